# The CUDA compiler: nvcc, looked for at every configure until it is there. Sets MOIRE_HAS_CUDA and MOIRE_CUDA_BUILD (what
# the library says of itself), and without CUDA MOIRE_NO_CUDA_REASON.
set(oldest_cuda 12.4)

# Sets compiler to what was given (CMAKE_CUDA_COMPILER, CUDACXX) or else to the nvcc of the PATH or of a usual folder, which many
# machines leave out of the PATH.
function(find_cuda_compiler)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # NOTFOUND, where an earlier configure found none
  endif()
  set(compiler "${CMAKE_CUDA_COMPILER}")
  if(NOT compiler)
    set(compiler "$ENV{CUDACXX}")
  endif()
  if(NOT compiler)
    unset(compiler)
    find_program(compiler nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  endif()
  set(compiler "${compiler}" PARENT_SCOPE)
endfunction()

# Before CMake tries it: a compiler that is too old may fail there, for what it does not know of its host's.
function(check_cuda_version)
  execute_process(COMMAND ${compiler} --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(said MATCHES "release ([0-9]+[.][0-9]+)" AND CMAKE_MATCH_1 VERSION_LESS oldest_cuda)
    message(FATAL_ERROR "moire needs CUDA ${oldest_cuda} or newer, but ${compiler} is of CUDA ${CMAKE_MATCH_1}: set CUDACXX "
                        "to a newer nvcc, or leave CUDA out with MOIRE_CUDA=OFF")
  endif()
endfunction()

set(MOIRE_HAS_CUDA OFF)
string(TOUPPER "${MOIRE_CUDA}" wanted)  # in CMake's words for on and off, as cmake/wheel_backend.py has them
if(NOT wanted MATCHES "^(AUTO|ON|1|YES|Y|TRUE|OFF|0|NO|N|FALSE)$")
  message(FATAL_ERROR "MOIRE_CUDA is ${MOIRE_CUDA}, must be AUTO, ON or OFF")
endif()
if(NOT MOIRE_CUDA)
  set(MOIRE_NO_CUDA_REASON "it was built with MOIRE_CUDA=OFF")
else()
  find_cuda_compiler()
  if(compiler)
    check_cuda_version()
    set(CMAKE_CUDA_COMPILER ${compiler} CACHE FILEPATH "CUDA compiler")
    set(MOIRE_HAS_CUDA ON)
  elseif(NOT wanted STREQUAL "AUTO")
    message(FATAL_ERROR "MOIRE_CUDA=ON, but no CUDA compiler was found: put nvcc on the PATH or set CUDACXX")
  else()
    set(MOIRE_NO_CUDA_REASON "no nvcc was found when it was built")
  endif()
endif()
if(NOT MOIRE_HAS_CUDA)
  set(MOIRE_CUDA_BUILD "off: ${MOIRE_NO_CUDA_REASON}")
  message(STATUS "moire: CUDA is off: ${MOIRE_NO_CUDA_REASON}. Everything else is built.")
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES 80-real 80-virtual 90a-real)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's flag
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
target_compile_options(moire_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;-fmad=false;-diag-suppress=2810;-Xptxas=--warn-on-spills;--threads=2>)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)  # a third of the library's size
  target_compile_options(moire_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()
set(MOIRE_CUDA_BUILD "${CMAKE_CUDA_COMPILER_VERSION}")
message(STATUS "moire: CUDA is on (nvcc ${CMAKE_CUDA_COMPILER_VERSION})")
