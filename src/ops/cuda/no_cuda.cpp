#include "ops/backends.h"

// The CUDA side of a build without CUDA.

namespace sb::cuda {
namespace {

[[noreturn]] void refuse() {
  throw UserError(
      "device: cuda was requested, but this program was built without CUDA; use device: cpu, or build with the cuda "
      "preset");
}

}  // namespace

void linear_forward(const Exec&, TensorView, TensorView, TensorView, TensorView, TensorView) {
  refuse();
}
void add(const Exec&, TensorView, TensorView, TensorView) {
  refuse();
}
void linear_backward_input(const Exec&, TensorView, TensorView, TensorView, bool) {
  refuse();
}
void linear_backward_weight(const Exec&, TensorView, TensorView, TensorView, bool) {
  refuse();
}
void linear_backward_bias(const Exec&, TensorView, TensorView) {
  refuse();
}
void multiply_transposed(const Exec&, const Columns&, TensorView, float, const Columns&, bool) {
  refuse();
}
void multiply(const Exec&, const Columns&, TensorView, float, const Columns&, bool) {
  refuse();
}
void add_outer_products(const Exec&, const Columns&, const Columns&, TensorView, bool) {
  refuse();
}
void dropout(const Exec&, const DropoutRows&, TensorView, TensorView, bool) {
  refuse();
}
void rmsnorm_forward(const Exec&, TensorView, TensorView, float, TensorView, TensorView) {
  refuse();
}
void rmsnorm_backward(const Exec&, TensorView, TensorView, TensorView, TensorView, TensorView, bool, TensorView) {
  refuse();
}
void qkv_rope_forward(const Exec&, const QkvShape&, TensorView, TensorView, TensorView, TensorView, TensorView,
                      TensorView, float, TensorView, TensorView, TensorView, TensorView, TensorView) {
  refuse();
}
void qkv_rope_backward(const Exec&, const QkvShape&, TensorView, TensorView, TensorView, TensorView, TensorView,
                       TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView,
                       TensorView) {
  refuse();
}
void swiglu_forward(const Exec&, TensorView, TensorView, TensorView) {
  refuse();
}
void swiglu_backward(const Exec&, TensorView, TensorView, TensorView, TensorView) {
  refuse();
}
void embedding_forward(const Exec&, TensorView, TensorView, TensorView, int64_t) {
  refuse();
}
void embedding_backward(const Exec&, TensorView, TensorView, TensorView, int64_t, int64_t) {
  refuse();
}
void loss_forward(const Exec&, TensorView, TensorView, TensorView, TensorView, int64_t, TensorView, LossSums*,
                  std::span<const int32_t>, const VocabularyPart&) {
  refuse();
}
void loss_forward_backward(const Exec&, TensorView, TensorView, TensorView, TensorView, int64_t, TensorView, TensorView,
                           TensorView, LossSums*, std::span<const int32_t>, bool, const VocabularyPart&) {
  refuse();
}
void adamw_update(const Exec&, const AdamWStep&, std::span<const DecayRange>, const AdamWBuffers&) {
  refuse();
}
void clip_by_norm(const Exec&, TensorView, double, TensorView) {
  refuse();
}
void round_parameters(const Exec&, TensorView, TensorView) {
  refuse();
}
int64_t embedding_scratch_bytes(int64_t) {
  refuse();
}
int64_t norm_scratch_bytes() {
  refuse();
}
double squared_norm(const Exec&, std::span<const TensorView>) {
  refuse();
}

}  // namespace sb::cuda
