#include <algorithm>
#include <cmath>
#include <vector>

#include "device/float16.h"
#include "ops/backends.h"
#include "ops/cpu/kernels.h"

namespace sb::cpu {
namespace {

// Elements [begin, end) of the buffers, which are in the range.
void update(const AdamWScalars& scalars, const DecayRange& range, const AdamWBuffers& buffers, int64_t step,
            int64_t begin, int64_t end) {
  float* p = buffers.parameters.f32();
  const float* g = buffers.gradients.f32();
  const auto& adamw = cpu_kernels().adamw;
  if (buffers.m.dtype() == DType::f32)
    return adamw(scalars, end - begin, p + begin, g + begin, buffers.m.f32() + begin, buffers.v.f32() + begin);
  auto *m = static_cast<uint16_t*>(buffers.m.raw()), *v = static_cast<uint16_t*>(buffers.v.raw());
  constexpr int64_t kBlock = 512;  // fp32 copies that stay in the cache
  float m_block[kBlock], v_block[kBlock];
  MomentBits bits(range.place.tensor, step);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    std::transform(m + at, m + at + count, m_block, f32_from_bf16);
    std::transform(v + at, v + at + count, v_block, f32_from_bf16);
    adamw(scalars, count, p + at, g + at, m_block, v_block);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t random = bits.at(range.place.of(at + i - range.begin));
      m[at + i] = bf16_from_f32(round_moment(m_block[i], random & 0xffff));
      v[at + i] = bf16_from_f32(round_moment(v_block[i], random >> 16));
    }
  }
}

}  // namespace

void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers) {
  SB_CHECK(buffers.weights.empty(), "adamw_update: the CPU computes in fp32");
  AdamWStep part = step;
  if (!buffers.clip.empty()) {
    const float* clip = buffers.clip.f32();
    if (!std::isfinite(clip[1])) return;
    part.gradient_scale *= clip[0];
  }
  constexpr int64_t kPiece = 1 << 16;
  for (const DecayRange& range : ranges) {
    part.weight_decay = range.decay ? step.weight_decay : 0.0f;
    const AdamWScalars scalars = adamw_scalars(part);
    exec.pool->parallel_for(range.end - range.begin, kPiece, [&](int64_t begin, int64_t end, int) {
      update(scalars, range, buffers, step.step, range.begin + begin, range.begin + end);
    });
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
