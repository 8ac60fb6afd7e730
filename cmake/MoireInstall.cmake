# What gets installed, and where. Two ways out of the build folder:
#   cmake --install     components library, headers (with find_package(moire) and moire.pc), tools and docs (the licences), into
#                       the usual folders
#   pip install .       component wheel: the library, moire.h, the command line and python/invoke.cpp, where that is built, beside the
#                       Python package's files
include(CMakePackageConfigHelpers)

# The version is the header's: whoever compiles against moire.h and whoever loads the library read the same number.
file(STRINGS include/moire.h line REGEX "#define MOIRE_VERSION_NUMBER ")
math(EXPR number "${PROJECT_VERSION_MAJOR} * 10000 + ${PROJECT_VERSION_MINOR} * 100 + ${PROJECT_VERSION_PATCH}")
if(NOT line MATCHES "MOIRE_VERSION_NUMBER ${number} ")
  message(FATAL_ERROR "CMakeLists.txt says version ${PROJECT_VERSION}, which is ${number}, but moire.h has: ${line}")
endif()

if(SKBUILD)
  # A wheel has no symbolic links: one plain libmoire.so.
  set_property(TARGET moire PROPERTY VERSION)
  set_property(TARGET moire PROPERTY SOVERSION)
  install(TARGETS moire LIBRARY DESTINATION lib COMPONENT wheel)
  install(FILES include/moire.h DESTINATION include COMPONENT wheel)
  get_target_property(type moire_invoke TYPE)
  if(type STREQUAL MODULE_LIBRARY)
    install(TARGETS moire_invoke LIBRARY DESTINATION lib COMPONENT wheel)
  endif()
  if(TARGET moire_cli)
    install(TARGETS moire_cli RUNTIME DESTINATION bin COMPONENT wheel)
  endif()
  # cmake/wheel_backend.py has named the wheel before CMake ran.
  set(label cpu)
  if(MOIRE_HAS_CUDA)
    string(REGEX REPLACE "^([0-9]+)\\.([0-9]+).*" "cu\\1\\2" label "${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  if(SKBUILD_PROJECT_VERSION_FULL MATCHES "\\+" AND NOT SKBUILD_PROJECT_VERSION_FULL MATCHES "\\+${label}$")
    message(FATAL_ERROR "the wheel is named ${SKBUILD_PROJECT_VERSION_FULL} but its library would be +${label}: say what it "
                        "holds with pip's -Ccmake.define.MOIRE_CUDA=ON or OFF, which names the wheel as well")
  endif()
  return()
endif()

install(TARGETS moire EXPORT moire-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
                                           ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT headers FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT docs)
install(DIRECTORY licenses DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT docs)
if(TARGET moire_cli)
  install(TARGETS moire_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
endif()

# What linking libmoire.a takes besides it; libmoire.so brings it along.
set(needed_packages "")
set(needed_libraries "-lstdc++ -lm -pthread")
if(MOIRE_HAS_CUDA)
  get_filename_component(folder "${CUDA_cudart_static_LIBRARY}" DIRECTORY)
  string(APPEND needed_libraries " -L${folder} -lcudart_static -ldl -lrt")
endif()
if(BUILD_SHARED_LIBS)
  set(needed_libraries "")
else()
  list(APPEND needed_packages Threads)
  if(MOIRE_HAS_CUDA)
    list(APPEND needed_packages CUDAToolkit)
  endif()
endif()

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moire)
install(EXPORT moire-targets NAMESPACE moire:: DESTINATION ${config_dir} COMPONENT headers)
set(config "include(CMakeFindDependencyMacro)\n")
foreach(package IN LISTS needed_packages)
  string(APPEND config "find_dependency(${package})\n")
endforeach()
string(APPEND config "include(\${CMAKE_CURRENT_LIST_DIR}/moire-targets.cmake)\n")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND config "if(NOT CMAKE_CXX_COMPILER_LOADED)  # a project in C does not link them of itself\n"
                       "  set_property(TARGET moire::moire APPEND PROPERTY INTERFACE_LINK_LIBRARIES stdc++ m)\n"
                       "endif()\n")
endif()
file(WRITE ${CMAKE_BINARY_DIR}/moire-config.cmake "${config}")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/moire-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/moire-config.cmake ${CMAKE_BINARY_DIR}/moire-config-version.cmake
        DESTINATION ${config_dir} COMPONENT headers)

# Paths from moire.pc's own place, so that an installed prefix may be carried elsewhere.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH prefix_from_pc /${pc_dir} /)
configure_file(cmake/moire.pc.in ${CMAKE_BINARY_DIR}/moire.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/moire.pc DESTINATION ${pc_dir} COMPONENT headers)
