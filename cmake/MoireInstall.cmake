# What gets installed, and where. Two ways out of the build folder:
#   cmake --install     components library, headers (with find_package(moire)) and tools, into the usual folders
#   pip install .       component wheel: the library, Highway and moire.h beside the Python package's files
include(CMakePackageConfigHelpers)

# The version is the header's: whoever compiles against moire.h and whoever loads the library read the same number.
file(STRINGS include/moire.h line REGEX "#define MOIRE_VERSION_NUMBER ")
math(EXPR number "${PROJECT_VERSION_MAJOR} * 10000 + ${PROJECT_VERSION_MINOR} * 100 + ${PROJECT_VERSION_PATCH}")
if(NOT line MATCHES "MOIRE_VERSION_NUMBER ${number} ")
  message(FATAL_ERROR "CMakeLists.txt says version ${PROJECT_VERSION}, which is ${number}, but moire.h has: ${line}")
endif()

# Highway as a shared library (Debian has no other) travels beside libmoire.so in wheels and in the build folder, which then
# runs on machines that do not have it. An installed prefix uses the system's.
get_target_property(highway_file hwy::hwy LOCATION)
set(highway_is_shared OFF)
if(highway_file MATCHES "\\.so")
  set(highway_is_shared ON)
  file(REAL_PATH "${highway_file}" highway_file)
  string(REGEX REPLACE ".*/(libhwy\\.so\\.[0-9]+).*" "\\1" highway_name "${highway_file}")  # its SONAME
  configure_file("${highway_file}" "${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/${highway_name}" COPYONLY)
endif()

if(SKBUILD)
  # A wheel has no symbolic links: one plain libmoire.so.
  set_target_properties(moire PROPERTIES VERSION "" SOVERSION "" NO_SONAME ON)
  install(TARGETS moire LIBRARY DESTINATION lib COMPONENT wheel)
  install(FILES include/moire.h DESTINATION include COMPONENT wheel)
  if(highway_is_shared)
    install(PROGRAMS "${highway_file}" DESTINATION lib RENAME "${highway_name}" COMPONENT wheel)
  endif()
  return()
endif()

install(TARGETS moire EXPORT moire-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT headers FILES_MATCHING PATTERN "*.h")
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moire)
install(EXPORT moire-targets NAMESPACE moire:: DESTINATION ${config_dir} COMPONENT headers)
file(WRITE ${CMAKE_BINARY_DIR}/moire-config.cmake "include(\${CMAKE_CURRENT_LIST_DIR}/moire-targets.cmake)\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/moire-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/moire-config.cmake ${CMAKE_BINARY_DIR}/moire-config-version.cmake
        DESTINATION ${config_dir} COMPONENT headers)
if(TARGET moire_cli)
  install(TARGETS moire_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
endif()
