// Compiled once per instruction set (sb_isa_sources).

#include <immintrin.h>

#include <cstdint>

namespace sb::SB_ISA {

#if defined(SB_ISA_avx512)
using Vf = __m512;
inline Vf splat(float x) {
  return _mm512_set1_ps(x);
}
inline Vf multiply_add(Vf a, Vf b, Vf c) {
  return _mm512_fmadd_ps(a, b, c);
}
#else
using Vf = __m256;
inline Vf splat(float x) {
  return _mm256_set1_ps(x);
}
inline Vf multiply_add(Vf a, Vf b, Vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
#endif

// Runs `rounds` of multiply-adds of whole vectors that do not wait for each other, in registers alone, and returns the
// floating-point operations that were done.
int64_t multiply_add_loop(int64_t rounds) {
  // Two units of latency 5 (Haswell) are kept busy by 10; with the factor and the term, all fit into 16 registers.
  constexpr int kSums = 12;
  const Vf factor = splat(0.999f), term = splat(0.001f);
  Vf sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = splat(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = multiply_add(sums[i], factor, term);
  }
  Vf all = sums[0];
  for (int i = 1; i < kSums; ++i) all += sums[i];
  asm volatile("" : : "v"(all));  // used: nothing above may be left out
  return rounds * kSums * static_cast<int64_t>(sizeof(Vf) / sizeof(float)) * 2;
}

}  // namespace sb::SB_ISA
