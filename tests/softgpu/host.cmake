# The host's half of the software device: the functions that hosts call.
target_sources(softgpu PRIVATE
  blas/cublaslt.cpp
  blas/product.cpp
  driver/encode_tensor_map.cpp
  runtime/device_functions.cpp
  runtime/device_memory.cpp
  runtime/device_model.cpp
  runtime/errors.cpp
  runtime/faults.cpp
  runtime/memory_functions.cpp
  runtime/scheduler.cpp
  runtime/stream_functions.cpp)
# Headers in the place of the toolkit's libraries of kernels (CUB).
target_include_directories(softgpu PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/headers)
target_include_directories(softgpu PRIVATE ${OPENBLAS_INCLUDE_DIR})
target_link_libraries(softgpu PUBLIC ${OPENBLAS_LIBRARY})

# NCCL, which programs load: the tests' own, on streams. It calls the device in the program. Programs are linked with it, so
# that it is there already when they load it, and not the machine's.
add_library(softgpu_nccl SHARED ${PROJECT_SOURCE_DIR}/tests/comm/fake_nccl.cpp nccl/streams.cpp)
set_target_properties(softgpu_nccl PROPERTIES OUTPUT_NAME nccl SOVERSION 2)
target_include_directories(softgpu_nccl PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/tests)
target_include_directories(softgpu_nccl SYSTEM PRIVATE ${SB_CUDA_HEADERS})
target_link_libraries(softgpu_nccl PRIVATE sb_options)
target_link_options(softgpu INTERFACE -rdynamic -Wl,--no-as-needed -Wl,--unresolved-symbols=ignore-in-shared-libs)
target_link_libraries(softgpu INTERFACE softgpu_nccl)
