#pragma once

#include "core/arena.h"
#include "core/tensor.h"
#include "core/thread_pool.h"

namespace sb {

class CudaProducts;

// Where and with what an operation runs: handed down from the trainer to every operation. On the CPU the pool does the
// work; on CUDA work is queued on the stream (a cudaStream_t) and nothing waits.
struct Exec {
  DeviceKind device = DeviceKind::cpu;
  ThreadPool* pool = nullptr;
  void* stream = nullptr;
  // Temporaries of one operation; always released before it returns.
  Arena* scratch = nullptr;
  CudaProducts* products = nullptr;  // CUDA: matrix products on the stream
};

}  // namespace sb
