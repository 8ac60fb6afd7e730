# What moire is built on. Highway's headers are required; CUDA is used when nvcc is there; the rest belongs to tools and tests.
include(MoireHeaders)
find_package(Threads REQUIRED)

set(oldest_highway 1.0.1)
moire_headers(highway HEADER hwy/highway.h RELEASE 1.2.0
              URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
              SHA256 7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343)
set(numbers "")
foreach(part MAJOR MINOR PATCH)
  # In highway.h; since 1.0.5 in base.h.
  file(STRINGS ${MOIRE_HIGHWAY_INCLUDE_DIR}/hwy/base.h line REGEX "^#define HWY_${part} ")
  if(NOT line)
    file(STRINGS ${MOIRE_HIGHWAY_INCLUDE_DIR}/hwy/highway.h line REGEX "^#define HWY_${part} ")
  endif()
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND numbers "${number}")
endforeach()
list(JOIN numbers "." highway_version)
if(highway_version VERSION_LESS oldest_highway)
  message(FATAL_ERROR "moire needs Highway ${oldest_highway} or newer, but ${MOIRE_HIGHWAY_INCLUDE_DIR}/hwy is version "
                      "${highway_version}: set MOIRE_HIGHWAY_INCLUDE_DIR to a newer one, or FETCHCONTENT_SOURCE_DIR_HIGHWAY to its sources")
endif()
message(STATUS "moire: Highway ${highway_version} of ${MOIRE_HIGHWAY_INCLUDE_DIR}")
add_library(moire_highway INTERFACE)
target_include_directories(moire_highway SYSTEM INTERFACE $<BUILD_INTERFACE:${MOIRE_HIGHWAY_INCLUDE_DIR}>)

include(MoireCuda)
