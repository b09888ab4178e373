#include <algorithm>
#include <cstring>

#include "ops/backends.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/pieces.h"

namespace sb::cpu {

void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x, int64_t first) {
  const int64_t width = x.dim(1);
  const int32_t* ids = tokens.as<int32_t>();
  exec.pool->parallel_for(x.dim(0), rows_per_piece(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = ids[t] - first;
      if (0 <= row && row < table.dim(0))
        std::memcpy(x.f32() + t * width, table.f32() + row * width, static_cast<size_t>(width) * sizeof(float));
      else
        std::memset(x.f32() + t * width, 0, static_cast<size_t>(width) * sizeof(float));
    }
  });
}

void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable, int64_t first) {
  const int64_t width = dx.dim(1);
  const int32_t* ids = tokens.as<int32_t>();
  // Columns over the threads: two threads never meet in a row and every element sums its tokens in order.
  constexpr int64_t kColumns = 16;
  exec.pool->parallel_slices((width + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end, int) {
    const int64_t column = begin * kColumns, count = std::min(width, end * kColumns) - column;
    for (int64_t t = 0; t < dx.dim(0); ++t) {
      const int64_t row = ids[t] - first;
      if (0 <= row && row < dtable.dim(0))
        cpu_kernels().add(dx.f32() + t * width + column, count, dtable.f32() + row * width + column);
    }
  });
}

}  // namespace sb::cpu
