#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/backends.h"
#include "ops/cpu/kernels.h"

namespace sb::cpu {

void adamw_update(const Exec& exec, const AdamWStep& step, TensorView parameters, TensorView gradients, TensorView m,
                  TensorView v) {
  const AdamWScalars scalars = adamw_scalars(step);
  constexpr int64_t kPiece = 1 << 16;
  exec.pool->parallel_for(parameters.elements(), kPiece, [&](int64_t begin, int64_t end, int) {
    cpu_kernels().adamw(scalars, end - begin, parameters.f32() + begin, gradients.f32() + begin, m.f32() + begin,
                        v.f32() + begin);
  });
}

void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers) {
  SB_CHECK(buffers.weights.empty(), "adamw_update: the CPU computes in fp32");
  AdamWStep part = step;
  if (!buffers.clip.empty()) {
    const float* clip = buffers.clip.f32();
    if (!std::isfinite(clip[1])) return;
    part.gradient_scale *= clip[0];
  }
  for (const DecayRange& range : ranges) {
    part.weight_decay = range.decay ? step.weight_decay : 0.0f;
    cpu::adamw_update(exec, part, buffers.parameters.rows(range.begin, range.end),
                      buffers.gradients.rows(range.begin, range.end), buffers.m.rows(range.begin, range.end),
                      buffers.v.rows(range.begin, range.end));
  }
}

void clip_by_norm(const Exec& exec, TensorView gradients, double max_norm, TensorView clip) {
  const double norm = std::sqrt(cpu::squared_norm(exec, gradients));
  const bool above = max_norm > 0 && norm > max_norm;
  clip.f32()[0] = above ? static_cast<float>(max_norm / (norm + 1e-6)) : 1.0f;
  clip.f32()[1] = static_cast<float>(norm);
}

double squared_norm(const Exec& exec, TensorView x) {
  constexpr int64_t kPiece = 1 << 16;
  std::vector<double> sums(static_cast<size_t>((x.elements() + kPiece - 1) / kPiece));
  exec.pool->parallel_for(static_cast<int64_t>(sums.size()), 1, [&](int64_t piece, int64_t, int) {
    const int64_t begin = piece * kPiece;
    sums[static_cast<size_t>(piece)] =
        cpu_kernels().squared_sum(x.f32() + begin, std::min(kPiece, x.elements() - begin));
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace sb::cpu
