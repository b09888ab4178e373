#pragma once

// Vectors of fp32 for files compiled once per instruction set (sb_isa_sources): 16 lanes with AVX-512, 8 with AVX2.
// Everything lives in namespace sb::SB_ISA, so that the two versions never meet at link time; such files must keep
// away from inline functions and templates of other headers for the same reason.

// GCC 12 warns about its own _mm512_undefined_ps (GCC bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

namespace sb::SB_ISA {

#if defined(SB_ISA_avx512)

using Vf = __m512;  // + - * / and comparison with operators (GCC vector type)
using Mask = __mmask16;
constexpr int kLanes = 16;

inline Vf splat(float x) {
  return _mm512_set1_ps(x);
}
inline Vf zero() {
  return _mm512_setzero_ps();
}
inline Vf load(const float* p) {
  return _mm512_loadu_ps(p);
}
inline void store(float* p, Vf x) {
  _mm512_storeu_ps(p, x);
}
// The first `count` (0 … kLanes) lanes.
inline Mask first_lanes(int64_t count) {
  return static_cast<Mask>((1u << count) - 1u);
}
inline Vf load(const float* p, Mask m) {
  return _mm512_maskz_loadu_ps(m, p);
}  // other lanes 0
inline void store(float* p, Mask m, Vf x) {
  _mm512_mask_storeu_ps(p, m, x);
}
inline Vf select(Mask m, Vf yes, Vf no) {
  return _mm512_mask_blend_ps(m, no, yes);
}
inline Mask less(Vf a, Vf b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
inline Vf fma(Vf a, Vf b, Vf c) {
  return _mm512_fmadd_ps(a, b, c);
}  // a·b + c
inline Vf fnma(Vf a, Vf b, Vf c) {
  return _mm512_fnmadd_ps(a, b, c);
}  // c - a·b
inline Vf max(Vf a, Vf b) {
  return _mm512_max_ps(a, b);
}  // b where either is NaN
inline Vf min(Vf a, Vf b) {
  return _mm512_min_ps(a, b);
}  // b where either is NaN
inline Vf sqrt(Vf x) {
  return _mm512_sqrt_ps(x);
}
inline float reduce_add(Vf x) {
  return _mm512_reduce_add_ps(x);
}
inline float reduce_max(Vf x) {
  return _mm512_reduce_max_ps(x);
}
inline Vf round_nearest(Vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p · 2^n for |n| ≤ 128, p near 1, result normal.
inline Vf scale_by_power(Vf p, Vf n) {
  return _mm512_scalef_ps(p, n);
}

#else

using Vf = __m256;
using Mask = __m256;  // all bits of a lane set or clear
constexpr int kLanes = 8;

inline Vf splat(float x) {
  return _mm256_set1_ps(x);
}
inline Vf zero() {
  return _mm256_setzero_ps();
}
inline Vf load(const float* p) {
  return _mm256_loadu_ps(p);
}
inline void store(float* p, Vf x) {
  _mm256_storeu_ps(p, x);
}
inline Mask first_lanes(int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane));
}
inline Vf load(const float* p, Mask m) {
  return _mm256_maskload_ps(p, _mm256_castps_si256(m));
}
inline void store(float* p, Mask m, Vf x) {
  _mm256_maskstore_ps(p, _mm256_castps_si256(m), x);
}
inline Vf select(Mask m, Vf yes, Vf no) {
  return _mm256_blendv_ps(no, yes, m);
}
inline Mask less(Vf a, Vf b) {
  return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
inline Vf fma(Vf a, Vf b, Vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Vf fnma(Vf a, Vf b, Vf c) {
  return _mm256_fnmadd_ps(a, b, c);
}
inline Vf max(Vf a, Vf b) {
  return _mm256_max_ps(a, b);
}
inline Vf min(Vf a, Vf b) {
  return _mm256_min_ps(a, b);
}
inline Vf sqrt(Vf x) {
  return _mm256_sqrt_ps(x);
}
inline float reduce_add(Vf x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float reduce_max(Vf x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline Vf round_nearest(Vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vf scale_by_power(Vf p, Vf n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

#endif

// The same operations on whole vectors, so that one body serves the middle and the end of a row.
struct AllLanes {};
inline Vf load(const float* p, AllLanes) {
  return load(p);
}
inline void store(float* p, AllLanes, Vf x) {
  store(p, x);
}
inline Vf select(AllLanes, Vf yes, Vf) {
  return yes;
}

// body(i, lanes) for i = 0, kLanes, … below count; lanes is AllLanes, and a Mask for what is left at the end.
template <typename Body>
inline __attribute__((always_inline)) void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, AllLanes{});
  if (i < count) body(i, first_lanes(count - i));
}

// e^t for t in [-87.3365, 88.7228], to about 1 ulp, the same bits on both instruction sets.
inline Vf exp_in_range(Vf t) {
  const Vf n = round_nearest(t * splat(1.44269504f));
  Vf r = fnma(n, splat(0.693359375f), t);  // exact: few bits in the first part of ln 2
  r = fnma(n, splat(-2.12194440e-4f), r);
  Vf p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  return scale_by_power(p, n);
}

// e^x: +inf above 88.7228; 0 below -87.3365, where the result would be denormal (so masked scores may be -inf); NaN
// stays NaN.
inline Vf exp(Vf x) {
  const Vf low = splat(-87.33654f), high = splat(88.72283f);
  const Vf y = exp_in_range(min(high, max(low, x)));  // this order of operands keeps NaN
  return select(less(high, x), splat(__builtin_inff()), select(less(x, low), zero(), y));
}

// exp for x ≤ 0 (softmax after the maximum is taken off): leaves the overflow test out.
inline Vf exp_nonpositive(Vf x) {
  const Vf low = splat(-87.33654f);
  return select(less(x, low), zero(), exp_in_range(max(low, x)));
}

}  // namespace sb::SB_ISA
