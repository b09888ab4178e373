#include "ops/backends.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/pieces.h"

namespace sb::cpu {

void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h) {
  const int64_t width = h.dim(1);
  exec.pool->parallel_for(h.dim(0), rows_per_piece(3 * width), [&](int64_t begin, int64_t end, int) {
    cpu_kernels().swiglu_forward(gate_up.f32() + begin * 2 * width, end - begin, width, h.f32() + begin * width);
  });
}

void swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, TensorView dgate_up, TensorView h) {
  const int64_t width = dh.dim(1);
  exec.pool->parallel_for(dh.dim(0), rows_per_piece(3 * width), [&](int64_t begin, int64_t end, int) {
    cpu_kernels().swiglu_backward(gate_up.f32() + begin * 2 * width, dh.f32() + begin * width, end - begin, width,
                                  dgate_up.f32() + begin * 2 * width, h.empty() ? nullptr : h.f32() + begin * width);
  });
}

}  // namespace sb::cpu
