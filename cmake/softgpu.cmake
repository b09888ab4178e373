# For the software device (tests/softgpu): .cu files are compiled by the host's compiler.

# Of all targets in a folder and below: their .cu files are C++, to which the compiler is given what nvcc would give.
function(sb_cuda_sources_as_cxx folder)
  # What nvcc does not warn of either.
  set(warnings -Wno-unknown-pragmas -Wno-uninitialized -Wno-maybe-uninitialized -Wno-missing-field-initializers -Wno-shadow
               -Wno-unused-variable -Wno-unused-but-set-variable -Wno-sign-compare
               -fno-strict-aliasing -mavx2 -mfma)
  # A volatile read beside atomics is meant.
  if(SB_SANITIZE MATCHES thread)
    list(APPEND warnings --param=tsan-distinguish-volatile=1)
  endif()
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL INTERFACE_LIBRARY OR type STREQUAL UTILITY)
      continue()
    endif()
    get_target_property(sources ${target} SOURCES)
    get_target_property(source_folder ${target} SOURCE_DIR)
    list(FILTER sources INCLUDE REGEX "\\.cu$")
    if(NOT sources)
      continue()
    endif()
    list(TRANSFORM sources PREPEND ${source_folder}/)
    set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES LANGUAGE CXX
      COMPILE_OPTIONS "-include;softgpu/cuda/device.h;${warnings}")
    # What stands in for headers of PTX comes before them.
    target_include_directories(${target} BEFORE PRIVATE ${PROJECT_SOURCE_DIR}/tests/softgpu/twins)
  endforeach()
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(below IN LISTS folders)
    sb_cuda_sources_as_cxx(${below})
  endforeach()
endfunction()
