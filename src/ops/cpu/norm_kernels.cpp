#include "ops/cpu/isa_kernels.h"
#include "ops/cpu/simd.h"

namespace sb::SB_ISA {
namespace {

float sum_of_squares(const float* x, int64_t n) {
  Vf s0 = zero(), s1 = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vf a = load(x + i), b = load(x + i + kLanes);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
  }
  for (; i < n; i += kLanes) {
    const Vf a = load(x + i, first_lanes(n - i < kLanes ? n - i : kLanes));
    s0 = fma(a, a, s0);
  }
  return reduce_add(s0 + s1);
}

// Σ a·b·c
float triple_dot(const float* a, const float* b, const float* c, int64_t n) {
  Vf s0 = zero(), s1 = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    s0 = fma(load(a + i) * load(b + i), load(c + i), s0);
    s1 = fma(load(a + i + kLanes) * load(b + i + kLanes), load(c + i + kLanes), s1);
  }
  for (; i < n; i += kLanes) {
    const Mask m = first_lanes(n - i < kLanes ? n - i : kLanes);
    s0 = fma(load(a + i, m) * load(b + i, m), load(c + i, m), s0);
  }
  return reduce_add(s0 + s1);
}

float reciprocal_rms(const float* x, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

}  // namespace

void rmsnorm_forward(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* y,
                     float* rstd) {
  for (int64_t t = 0; t < rows; ++t, x += width, y += width) {
    const float r = reciprocal_rms(x, width, eps);
    rstd[t] = r;
    const Vf rv = splat(r);
    for_vectors(width, [&](int64_t i, auto m) { store(y + i, m, load(x + i, m) * rv * load(weight + i, m)); });
  }
}

void rmsnorm_backward(const float* x, const float* weight, const float* rstd, const float* dy, int64_t rows,
                      int64_t width, float* dx, bool accumulate, float* dweight_sum) {
  for (int64_t t = 0; t < rows; ++t, x += width, dy += width, dx += width) {
    const float r = rstd[t];
    // dx = r · (w·dy - x · r² · mean(w·dy·x))
    const float c = triple_dot(dy, weight, x, width) * r * r / static_cast<float>(width);
    const Vf rv = splat(r), cv = splat(c);
    for_vectors(width, [&](int64_t i, auto m) {
      const Vf xv = load(x + i, m), g = load(dy + i, m);
      store(dweight_sum + i, m, fma(g, xv * rv, load(dweight_sum + i, m)));
      const Vf d = rv * fnma(xv, cv, g * load(weight + i, m));
      store(dx + i, m, accumulate ? load(dx + i, m) + d : d);
    });
  }
}

namespace {

// One head: optional normalisation, then the rotation of channel c with c + d/2.
void rotate_head(const float* x, const float* norm, float r, const float* cos, const float* sin, int64_t half,
                 float* y) {
  const Vf rv = splat(r);
  for_vectors(half, [&](int64_t i, auto m) {
    Vf a = load(x + i, m), b = load(x + half + i, m);
    if (norm != nullptr) {
      a = a * rv * load(norm + i, m);
      b = b * rv * load(norm + half + i, m);
    }
    const Vf c = load(cos + i, m), s = load(sin + i, m);
    store(y + i, m, fnma(b, s, a * c));
    store(y + half + i, m, fma(a, s, b * c));
  });
}

void rotate_head_back(const float* dy, const float* cos, const float* sin, int64_t half, float* dx) {
  for_vectors(half, [&](int64_t i, auto m) {
    const Vf a = load(dy + i, m), b = load(dy + half + i, m);
    const Vf c = load(cos + i, m), s = load(sin + i, m);
    store(dx + i, m, fma(b, s, a * c));
    store(dx + half + i, m, fnma(a, s, b * c));
  });
}

void copy(const float* from, int64_t n, float* to) {
  for_vectors(n, [&](int64_t i, auto m) { store(to + i, m, load(from + i, m)); });
}

}  // namespace

void rope_forward(const RopeRows& rope, const float* qkv, float* q, float* k, float* v, float* rstd_q, float* rstd_k) {
  const int64_t d = rope.head_dim, half = d / 2;
  for (int64_t t = 0; t < rope.rows; ++t) {
    const float* cos = rope.cos + rope.positions[t] * half;
    const float* sin = rope.sin + rope.positions[t] * half;
    for (int h = 0; h < rope.heads; ++h, qkv += d, q += d) {
      float r = 1.0f;
      if (rope.q_norm != nullptr) *rstd_q++ = r = reciprocal_rms(qkv, d, rope.eps);
      rotate_head(qkv, rope.q_norm, r, cos, sin, half, q);
    }
    for (int h = 0; h < rope.kv_heads; ++h, qkv += d, k += d) {
      float r = 1.0f;
      if (rope.k_norm != nullptr) *rstd_k++ = r = reciprocal_rms(qkv, d, rope.eps);
      rotate_head(qkv, rope.k_norm, r, cos, sin, half, k);
    }
    copy(qkv, rope.kv_heads * d, v);
    qkv += rope.kv_heads * d;
    v += rope.kv_heads * d;
  }
}

void rope_backward(const RopeRows& rope, const float* dq, const float* dk, const float* dv, const float* qkv,
                   const float* rstd_q, const float* rstd_k, float* dqkv, float* dq_norm_sum, float* dk_norm_sum) {
  const int64_t d = rope.head_dim, half = d / 2;
  for (int64_t t = 0; t < rope.rows; ++t) {
    const float* cos = rope.cos + rope.positions[t] * half;
    const float* sin = rope.sin + rope.positions[t] * half;
    for (int h = 0; h < rope.heads; ++h, dq += d, dqkv += d) {
      rotate_head_back(dq, cos, sin, half, dqkv);
      if (rope.q_norm != nullptr) {
        rmsnorm_backward(qkv, rope.q_norm, rstd_q++, dqkv, 1, d, dqkv, false, dq_norm_sum);
        qkv += d;
      }
    }
    for (int h = 0; h < rope.kv_heads; ++h, dk += d, dqkv += d) {
      rotate_head_back(dk, cos, sin, half, dqkv);
      if (rope.k_norm != nullptr) {
        rmsnorm_backward(qkv, rope.k_norm, rstd_k++, dqkv, 1, d, dqkv, false, dk_norm_sum);
        qkv += d;
      }
    }
    copy(dv, rope.kv_heads * d, dqkv);
    if (rope.q_norm != nullptr) qkv += rope.kv_heads * d;
    dv += rope.kv_heads * d;
    dqkv += rope.kv_heads * d;
  }
}

}  // namespace sb::SB_ISA
