# Build type, warnings, ccache, and the function that makes a layer.
option(MOIRE_BUILD_TOOLS "Build the command line and the reference" ON)
option(MOIRE_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(MOIRE_WERROR "Treat warnings as errors" ${PROJECT_IS_TOP_LEVEL})
option(MOIRE_OPENBLAS "Link libopenblas.a into the command line, where it is found: the baseline of moire bench" ON)
if(PROJECT_IS_TOP_LEVEL)
  option(BUILD_SHARED_LIBS "Build libmoire.so; OFF: libmoire.a" ON)
endif()
set(MOIRE_SANITIZE "" CACHE STRING "Sanitizers for every target, e.g. address,undefined")
set(MOIRE_CUDA "AUTO" CACHE STRING "AUTO: with CUDA if nvcc is there; ON: fail without it; OFF")
set(MOIRE_CUDA_ARCHITECTURES "80-real;80-virtual;90-real" CACHE STRING
    "What kernels for every GPU are compiled for; 80-virtual alone compiles fastest, and the driver the rest at the first call")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

# The same floating point everywhere: no contraction that the source does not spell out, no reassociation.
add_library(moire_flags INTERFACE)
target_compile_options(moire_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;-Wshadow;-ffp-contract=off>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${MOIRE_WERROR}>>:-Werror>)
if(MOIRE_SANITIZE)
  # GCC takes the sanitizers' own code for uses of uninitialised variables.
  add_compile_options(-fsanitize=${MOIRE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
                      -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=${MOIRE_SANITIZE})
endif()

set_property(GLOBAL PROPERTY MOIRE_LAYERS "")

# moire_layer(NAME DIRECTORY dir [EXCLUDE regex] | FILES files... [DEPENDS layers...] [LIBRARIES targets...]): the object library
# moire_NAME, which sees include/, src/ and what it names, and nothing else.
function(moire_layer name)
  cmake_parse_arguments(LAYER "" "DIRECTORY;EXCLUDE" "FILES;DEPENDS;LIBRARIES" ${ARGN})
  set(sources ${LAYER_FILES})
  if(LAYER_DIRECTORY)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${LAYER_DIRECTORY}/*.cpp ${LAYER_DIRECTORY}/*.cu)
    list(FILTER sources EXCLUDE REGEX "no_cuda.cpp$")
    if(LAYER_EXCLUDE)
      list(FILTER sources EXCLUDE REGEX ${LAYER_EXCLUDE})
    endif()
  endif()
  add_library(moire_${name} OBJECT ${sources})
  target_include_directories(moire_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(moire_${name} PRIVATE moire_flags ${LAYER_LIBRARIES})
  set_property(GLOBAL APPEND PROPERTY MOIRE_LAYERS moire_${name})
  set_property(TARGET moire_${name} PROPERTY MOIRE_LIBRARIES "${LAYER_LIBRARIES}")
endfunction()

# Links every layer's objects, and what they need, into `target`: the library itself, and tests that look inside.
function(moire_link_layers target visibility)
  get_property(layers GLOBAL PROPERTY MOIRE_LAYERS)
  find_package(Threads REQUIRED)
  target_link_libraries(${target} ${visibility} $<BUILD_INTERFACE:moire_flags> Threads::Threads)
  foreach(layer IN LISTS layers)
    get_target_property(libraries ${layer} MOIRE_LIBRARIES)
    target_sources(${target} ${visibility} $<TARGET_OBJECTS:${layer}>)
    if(libraries)
      target_link_libraries(${target} ${visibility} ${libraries})
    endif()
  endforeach()
endfunction()
