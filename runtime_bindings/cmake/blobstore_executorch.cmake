# Defines blobstore::executorch: the ExecuTorch that the library is built on, shared or static. Its property
# BLOBSTORE_LINKAGE says which.
#
#   executorch::runtime   the shared libraries of the wheel
#   executorch_core, ...  static libraries, from an install tree of ExecuTorch's sources or from the same build

# The imported targets add an rpath to where they are on this machine. This target has none; those that link it do.
function(blobstore_without_rpath target)
  set_target_properties(${target} PROPERTIES BLOBSTORE_WITHOUT_RPATH ON)
  set(wanted "$<NOT:$<BOOL:$<TARGET_PROPERTY:BLOBSTORE_WITHOUT_RPATH>>>")
  foreach(name runtime threadpool kernels_optimized kernels_quantized backend_xnnpack)
    if(TARGET executorch::${name})
      get_target_property(options executorch::${name} INTERFACE_LINK_OPTIONS)
      if(options)
        list(TRANSFORM options REPLACE "^(LINKER:-rpath,.*)$" "$<${wanted}:\\1>")
        set_property(TARGET executorch::${name} PROPERTY INTERFACE_LINK_OPTIONS "${options}")
      endif()
    endif()
  endforeach()
endfunction()

if(TARGET blobstore::executorch)
  return()
endif()

if(NOT TARGET executorch::runtime AND NOT TARGET executorch_core)
  find_package(executorch CONFIG REQUIRED GLOBAL)
  if(executorch_VERSION AND executorch_VERSION VERSION_LESS 1.5) # an install tree of the sources has no version
    message(FATAL_ERROR "blobstore_runtime needs ExecuTorch 1.5; ${executorch_DIR} has ${executorch_VERSION}")
  endif()
endif()

add_library(blobstore::executorch INTERFACE IMPORTED GLOBAL)
if(TARGET executorch::runtime)
  set_target_properties(
    blobstore::executorch PROPERTIES BLOBSTORE_LINKAGE SHARED INTERFACE_LINK_LIBRARIES executorch::runtime
  )
else()
  foreach(target executorch extension_tensor)
    if(NOT TARGET ${target})
      message(FATAL_ERROR "blobstore_runtime needs ExecuTorch's library ${target} (EXECUTORCH_BUILD_EXTENSION_TENSOR=ON)")
    endif()
  endforeach()
  set_target_properties(
    blobstore::executorch
    PROPERTIES BLOBSTORE_LINKAGE STATIC
               INTERFACE_LINK_LIBRARIES "extension_tensor;executorch"
               INTERFACE_INCLUDE_DIRECTORIES "${EXECUTORCH_INCLUDE_DIRS}"
               INTERFACE_COMPILE_DEFINITIONS C10_USING_CUSTOM_GENERATED_MACROS
  )
endif()
