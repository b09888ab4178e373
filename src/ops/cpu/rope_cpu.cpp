#include <array>
#include <vector>

#include "ops/backends.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/partial_sums.h"
#include "ops/cpu/pieces.h"

namespace sb::cpu {
namespace {

RopeRows rows_of(const QkvShape& shape, int64_t begin, int64_t end, const TensorView& positions, const TensorView& cos,
                 const TensorView& sin, const TensorView& q_norm, const TensorView& k_norm, float eps) {
  return {.heads = shape.heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .rows = end - begin,
          .positions = positions.as<int32_t>() + begin,
          .cos = cos.f32(),
          .sin = sin.f32(),
          .q_norm = q_norm.empty() ? nullptr : q_norm.f32(),
          .k_norm = k_norm.empty() ? nullptr : k_norm.f32(),
          .eps = eps};
}

// A pointer into an operand that may be absent.
float* at(const TensorView& tensor, int64_t offset) {
  return tensor.empty() ? nullptr : tensor.f32() + offset;
}

}  // namespace

void qkv_rope_forward(const Exec& exec, const QkvShape& shape, TensorView qkv, TensorView positions, TensorView cos,
                      TensorView sin, TensorView q_norm, TensorView k_norm, float eps, TensorView q, TensorView k,
                      TensorView v, TensorView rstd_q, TensorView rstd_k) {
  const int64_t q_width = int64_t{shape.heads} * shape.head_dim, kv_width = int64_t{shape.kv_heads} * shape.head_dim;
  exec.pool->parallel_for(qkv.dim(0), rows_per_piece(shape.width()), [&](int64_t begin, int64_t end, int) {
    cpu_kernels().rope_forward(rows_of(shape, begin, end, positions, cos, sin, q_norm, k_norm, eps),
                               qkv.f32() + begin * shape.width(), q.f32() + begin * q_width, k.f32() + begin * kv_width,
                               v.f32() + begin * kv_width, at(rstd_q, begin * shape.heads),
                               at(rstd_k, begin * shape.kv_heads));
  });
}

void qkv_rope_backward(const Exec& exec, const QkvShape& shape, TensorView dq, TensorView dk, TensorView dv,
                       TensorView positions, TensorView cos, TensorView sin, TensorView qkv, TensorView q_norm,
                       TensorView k_norm, TensorView rstd_q, TensorView rstd_k, TensorView dqkv, TensorView dq_norm,
                       TensorView dk_norm) {
  const int64_t q_width = int64_t{shape.heads} * shape.head_dim, kv_width = int64_t{shape.kv_heads} * shape.head_dim;
  const auto run = [&](int64_t begin, int64_t end, float* dq_norm_sum, float* dk_norm_sum) {
    cpu_kernels().rope_backward(rows_of(shape, begin, end, positions, cos, sin, q_norm, k_norm, 0.0f),
                                dq.f32() + begin * q_width, dk.f32() + begin * kv_width, dv.f32() + begin * kv_width,
                                at(qkv, begin * shape.width()), at(rstd_q, begin * shape.heads),
                                at(rstd_k, begin * shape.kv_heads), dqkv.f32() + begin * shape.width(), dq_norm_sum,
                                dk_norm_sum);
  };
  const int64_t tokens = dqkv.dim(0), d = shape.head_dim;
  if (q_norm.empty()) {
    exec.pool->parallel_for(tokens, rows_per_piece(shape.width()),
                            [&](int64_t begin, int64_t end, int) { run(begin, end, nullptr, nullptr); });
    return;
  }
  std::vector<float> sums(static_cast<size_t>(2 * d));  // of q's norm, then k's
  sum_over_rows(*exec.pool, tokens, shape.width(), 2 * d, sums.data(),
                [&](int64_t begin, int64_t end, float* slice) { run(begin, end, slice, slice + d); });
  if (dq_norm.empty()) return;
  cpu_kernels().add(sums.data(), d, dq_norm.f32());
  cpu_kernels().add(sums.data() + d, d, dk_norm.f32());
}

}  // namespace sb::cpu
