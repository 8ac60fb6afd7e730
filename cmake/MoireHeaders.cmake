# moire_headers(name HEADER header RELEASE version URL url SHA256 hash [SUBDIRECTORY folder]): a library of which moire needs the
# headers and nothing else. Sets MOIRE_<NAME>_INCLUDE_DIR, which in this order is
#   what the caller gave, under that name or as the sources FETCHCONTENT_SOURCE_DIR_<NAME>;
#   where CMake finds the header (CMAKE_PREFIX_PATH, the system), unless FETCHCONTENT_TRY_FIND_PACKAGE_MODE is NEVER;
#   the release, fetched from MOIRE_<NAME>_URL into the build folder. Whoever serves it, its hash is this one.
include(FetchContent)

function(moire_headers name)
  cmake_parse_arguments(ARG "" "HEADER;RELEASE;URL;SHA256;SUBDIRECTORY" "" ${ARGN})
  string(TOUPPER ${name} upper)
  set(variable MOIRE_${upper}_INCLUDE_DIR)
  set(MOIRE_${upper}_URL ${ARG_URL} CACHE STRING "Where ${name} ${ARG_RELEASE} is fetched if it is not found")
  mark_as_advanced(MOIRE_${upper}_URL)
  if(NOT FETCHCONTENT_SOURCE_DIR_${upper} AND NOT FETCHCONTENT_TRY_FIND_PACKAGE_MODE STREQUAL "NEVER")
    find_path(${variable} ${ARG_HEADER} DOC "The folder that holds ${ARG_HEADER}")
  endif()
  if(NOT ${variable})
    if(NOT FETCHCONTENT_SOURCE_DIR_${upper})
      message(STATUS "moire: ${ARG_HEADER} was not found. Fetching ${name} ${ARG_RELEASE}; without a network "
                     "say where it is: -D${variable}=FOLDER")
    endif()
    # A subfolder without CMakeLists.txt: nothing of it is configured.
    FetchContent_Declare(${name} URL ${MOIRE_${upper}_URL} URL_HASH SHA256=${ARG_SHA256}
                                 DOWNLOAD_EXTRACT_TIMESTAMP TRUE SOURCE_SUBDIR nothing-to-build)
    FetchContent_MakeAvailable(${name})
    string(REGEX REPLACE "/$" "" ${variable} "${${name}_SOURCE_DIR}/${ARG_SUBDIRECTORY}")
  endif()
  if(NOT EXISTS ${${variable}}/${ARG_HEADER})
    message(FATAL_ERROR "${${variable}} has no ${ARG_HEADER}: set ${variable} to the folder that does")
  endif()
  set(${variable} ${${variable}} PARENT_SCOPE)
endfunction()
