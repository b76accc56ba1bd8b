# SPDX-License-Identifier: Apache-2.0
# find_package(distr) and pkg-config.
include(CMakePackageConfigHelpers)

install(TARGETS distr EXPORT distr-targets)
install(DIRECTORY include/distr DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET distr_cli)
  install(TARGETS distr_cli)
endif()

if(NOT BUILD_SHARED_LIBS)
  # A static libdistr.a needs Highway at its user's link, and must hold no reference to the object library.
  install(TARGETS distr_objects distr_options EXPORT distr-targets)
endif()
install(EXPORT distr-targets NAMESPACE distr:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/distr)

configure_package_config_file(cmake/distr-config.cmake.in distr-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/distr)
write_basic_package_version_file(distr-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/distr-config.cmake ${PROJECT_BINARY_DIR}/distr-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/distr)

file(RELATIVE_PATH pkgconfig_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/distr.pc.in distr.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/distr.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
