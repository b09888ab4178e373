#include "ops/adamw.h"

#include <cmath>

#include "ops/adamw_scalars.h"
#include "ops/backends.h"
#include "ops/check_shape.h"

namespace sb {

AdamWScalars adamw_scalars(const AdamWStep& step) {
  const double beta1 = step.beta1, beta2 = step.beta2, rate = step.learning_rate;
  return {
      .gradient_scale = step.gradient_scale,
      .beta1 = step.beta1,
      .one_minus_beta1 = static_cast<float>(1.0 - beta1),
      .beta2 = step.beta2,
      .one_minus_beta2 = static_cast<float>(1.0 - beta2),
      .decay = static_cast<float>(1.0 - rate * step.weight_decay),
      .step_size = static_cast<float>(rate / (1.0 - std::pow(beta1, static_cast<double>(step.step)))),
      .inverse_sqrt_correction2 =
          static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, static_cast<double>(step.step)))),
      .eps = step.eps,
  };
}

void adamw_update(const Exec& exec, const AdamWStep& step, TensorView parameters, TensorView gradients, TensorView m,
                  TensorView v) {
  const DecayRange whole = {0, parameters.elements(), true};
  adamw_update(exec, step, std::span(&whole, 1), AdamWBuffers{parameters, gradients, m, v, {}, {}});
}

namespace {

void check_clip(const Exec& exec, const char* operation, const TensorView& clip) {
  check_operand(exec, operation, "clip", clip, DType::f32, {2});
}

}  // namespace

void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers) {
  SB_CHECK(step.step >= 1, "adamw_update: step {}; the first is 1", step.step);
  const int64_t elements = buffers.parameters.elements();
  const Shape flat = {elements};
  check_operand(exec, "adamw_update", "parameters", buffers.parameters, DType::f32, flat);
  check_operand(exec, "adamw_update", "gradients", buffers.gradients, DType::f32, flat);
  const DType moments = buffers.m.dtype() == DType::bf16 ? DType::bf16 : DType::f32;
  check_operand(exec, "adamw_update", "m", buffers.m, moments, flat);
  check_operand(exec, "adamw_update", "v", buffers.v, moments, flat);
  if (!buffers.weights.empty()) check_operand(exec, "adamw_update", "weights", buffers.weights, DType::bf16, flat);
  if (!buffers.clip.empty()) check_clip(exec, "adamw_update", buffers.clip);
  int64_t last = 0;
  for (const DecayRange& range : ranges) {
    SB_CHECK(last <= range.begin && range.begin <= range.end && range.end <= elements,
             "adamw_update: range {} to {} after {} of {} elements", range.begin, range.end, last, elements);
    last = range.end;
  }
  if (exec.device == DeviceKind::cuda) return cuda::adamw_update(exec, step, ranges, buffers);
  cpu::adamw_update(exec, step, ranges, buffers);
}

void clip_by_norm(const Exec& exec, TensorView gradients, double max_norm, TensorView clip) {
  check_operand(exec, "clip_by_norm", "gradients", gradients, DType::f32, gradients.shape());
  check_clip(exec, "clip_by_norm", clip);
  if (exec.device == DeviceKind::cuda) return cuda::clip_by_norm(exec, gradients, max_norm, clip);
  cpu::clip_by_norm(exec, gradients, max_norm, clip);
}

void round_parameters(const Exec& exec, TensorView parameters, TensorView weights) {
  check_operand(exec, "round_parameters", "parameters", parameters, DType::f32, parameters.shape());
  check_operand(exec, "round_parameters", "weights", weights, DType::bf16, parameters.shape());
  SB_CHECK(exec.device == DeviceKind::cuda, "round_parameters: the CPU computes in fp32");
  cuda::round_parameters(exec, parameters, weights);
}

int64_t norm_scratch_bytes(DeviceKind device) {
  return device == DeviceKind::cuda ? cuda::norm_scratch_bytes() : 0;
}

double squared_norm(const Exec& exec, TensorView x) {
  return squared_norm(exec, std::span<const TensorView>(&x, 1));
}

double squared_norm(const Exec& exec, std::span<const TensorView> pieces) {
  for (const TensorView& x : pieces) check_operand(exec, "squared_norm", "x", x, DType::f32, x.shape());
  if (exec.device == DeviceKind::cuda) return cuda::squared_norm(exec, pieces);
  double sum = 0;
  for (const TensorView& x : pieces) sum += cpu::squared_norm(exec, x);
  return sum;
}

}  // namespace sb
