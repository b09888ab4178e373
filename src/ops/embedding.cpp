#include "ops/embedding.h"

#include <algorithm>

#include "ops/backends.h"
#include "ops/check_shape.h"

namespace sb {

void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x, int64_t first) {
  check_operand(exec, "embedding_forward", "tokens", tokens, DType::i32, {x.dim(0)});
  check_operand(exec, "embedding_forward", "table", table, x.dtype(), {table.dim(0), x.dim(1)});
  check_operand(exec, "embedding_forward", "x", x, x.dtype(), {x.dim(0), x.dim(1)});
  if (exec.device == DeviceKind::cuda) return cuda::embedding_forward(exec, tokens, table, x, first);
  cpu::embedding_forward(exec, tokens, table, x, first);
}

void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable, int64_t first,
                        int64_t vocabulary) {
  check_operand(exec, "embedding_backward", "tokens", tokens, DType::i32, {dx.dim(0)});
  check_operand(exec, "embedding_backward", "dx", dx, dx.dtype(), {dx.dim(0), dx.dim(1)});
  check_operand(exec, "embedding_backward", "dtable", dtable, DType::f32, {dtable.dim(0), dx.dim(1)});
  if (exec.device == DeviceKind::cuda)
    return cuda::embedding_backward(exec, tokens, dx, dtable, first, std::max(vocabulary, dtable.dim(0)));
  cpu::embedding_backward(exec, tokens, dx, dtable, first);
}

int64_t embedding_scratch_bytes(DeviceKind device, int64_t tokens) {
  return device == DeviceKind::cuda ? cuda::embedding_scratch_bytes(tokens) : 0;
}

}  // namespace sb
