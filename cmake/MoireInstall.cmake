# Headers, library, command line, and find_package(moire).
include(CMakePackageConfigHelpers)
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
