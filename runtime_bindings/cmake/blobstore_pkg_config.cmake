# Installs blobstore.pc for builds without CMake. It names the shared library if there is one, or else the static ones,
# and says of ExecuTorch what the targets of its wheel say to CMake.
set(pc_libs "-lblobstore_runtime -lblobstore_core")
set(pc_flags "")
if(TARGET blobstore::runtime_shared)
  set(pc_libs -lblobstore_runtime)
  set(pc_flags -DBLOBSTORE_RUNTIME_SHARED)
elseif(BLOBSTORE_ZSTD STREQUAL "system")
  string(APPEND pc_libs " -lzstd")
endif()
set(pc_folder ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX}/${pc_folder} OUTPUT_VARIABLE pc_to_prefix)

get_target_property(pc_library executorch::runtime IMPORTED_LOCATION)
cmake_path(SET pc_executorch NORMALIZE ${pc_library}/../..)
cmake_path(GET pc_executorch PARENT_PATH pc_executorch) # without the separator at the end
get_target_property(pc_includes executorch::runtime INTERFACE_INCLUDE_DIRECTORIES)
foreach(folder ${pc_includes})
  cmake_path(NORMAL_PATH folder)
  cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${pc_executorch})
  string(APPEND pc_flags " -I\${executorch}/${folder}")
endforeach()
get_target_property(pc_definitions executorch::runtime INTERFACE_COMPILE_DEFINITIONS)
list(TRANSFORM pc_definitions PREPEND " -D")
string(APPEND pc_flags ${pc_definitions})

if(TARGET executorch::threadpool) # the shared library names it, and whoever runs that looks where the application does
  set(pc_threadpool -lexecutorch_threadpool)
  if(NOT APPLE)
    set(pc_threadpool "-Wl,--push-state,--no-as-needed ${pc_threadpool} -Wl,--pop-state")
  endif()
endif()
configure_file(cmake/blobstore.pc.in ${CMAKE_CURRENT_BINARY_DIR}/blobstore.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/blobstore.pc DESTINATION ${pc_folder})
