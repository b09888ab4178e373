#include <vector>

#include "ops/backends.h"
#include "ops/check_shape.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/partial_sums.h"
#include "ops/cpu/pieces.h"

namespace sb::cpu {

void rmsnorm_forward(const Exec& exec, TensorView x, TensorView weight, float eps, TensorView y, TensorView rstd) {
  const int64_t width = last_dim(x);
  exec.pool->parallel_for(rstd.elements(), rows_per_piece(width), [&](int64_t begin, int64_t end, int) {
    cpu_kernels().rmsnorm_forward(x.f32() + begin * width, weight.f32(), eps, end - begin, width,
                                  y.f32() + begin * width, rstd.f32() + begin);
  });
}

void rmsnorm_backward(const Exec& exec, TensorView x, TensorView weight, TensorView rstd, TensorView dy, TensorView dx,
                      bool accumulate, TensorView dweight) {
  const int64_t width = last_dim(x);
  std::vector<float> unwanted(dweight.empty() ? static_cast<size_t>(width) : 0);
  float* sum = dweight.empty() ? unwanted.data() : dweight.f32();
  sum_over_rows(*exec.pool, rstd.elements(), width, width, sum, [&](int64_t begin, int64_t end, float* sums) {
    cpu_kernels().rmsnorm_backward(x.f32() + begin * width, weight.f32(), rstd.f32() + begin, dy.f32() + begin * width,
                                   end - begin, width, dx.f32() + begin * width, accumulate, sums);
  });
}

}  // namespace sb::cpu
