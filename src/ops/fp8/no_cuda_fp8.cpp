#include "core/errors.h"
#include "ops/fp8/backends.h"

// The CUDA side of a build without CUDA.

namespace sb::cuda {
namespace {

[[noreturn]] void refuse() {
  throw UserError("fp8 on a GPU was requested, but this program was built without CUDA; build with the cuda preset");
}

}  // namespace

void fp8_quantize(const Exec&, TensorView, const Fp8Matrix&, TensorView) {
  refuse();
}
void fp8_swiglu_backward(const Exec&, TensorView, TensorView, const Fp8Matrix&, const Fp8Matrix&) {
  refuse();
}
void fp8_multiply(const Exec&, const Fp8Operand&, const Fp8Operand&, TensorView, TensorView, TensorView) {
  refuse();
}

}  // namespace sb::cuda
