#include <algorithm>
#include <cstring>

#include "ops/backends.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/pieces.h"

namespace sb::cpu {

void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x) {
  const int64_t width = x.dim(1);
  const int32_t* ids = tokens.as<int32_t>();
  exec.pool->parallel_for(x.dim(0), rows_per_piece(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(x.f32() + t * width, table.f32() + ids[t] * width, static_cast<size_t>(width) * sizeof(float));
    }
  });
}

void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable) {
  const int64_t width = dx.dim(1);
  const int32_t* ids = tokens.as<int32_t>();
  // Columns over the threads: two threads never meet in a row and every element sums its tokens in order.
  constexpr int64_t kColumns = 16;
  exec.pool->parallel_slices((width + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kColumns, count = std::min(width, end * kColumns) - first;
    for (int64_t t = 0; t < dx.dim(0); ++t) {
      cpu_kernels().add(dx.f32() + t * width + first, count, dtable.f32() + ids[t] * width + first);
    }
  });
}

}  // namespace sb::cpu
