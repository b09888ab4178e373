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
