#pragma once

// Products of bf16, for files compiled once per instruction set: two neighbouring channels lie in one number of 32
// bits, the first in its lower half.

#include "ops/cpu/simd.h"

namespace sb::SB_ISA {

using Vu = uint32_t __attribute__((vector_size(sizeof(Vf))));
constexpr uint32_t kUpperHalf = 0xffff0000u;

// Rounded to nearest, ties to even, NaN stays NaN: the bf16 is the upper half of every lane; the lower is arbitrary.
inline Vu round_to_upper_half(Vf x) {
  const Vu bits = reinterpret_cast<Vu>(x);
  const Vu rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x400000;
  const Vu not_a_number = reinterpret_cast<Vu>((bits & 0x7fffffff) > 0x7f800000);
  return (not_a_number & quiet) | (~not_a_number & rounded);
}

// The bf16 of two channels as one number.
inline Vf pair_of(Vf first, Vf second) {
  return reinterpret_cast<Vf>((round_to_upper_half(first) >> 16) | (round_to_upper_half(second) & kUpperHalf));
}
inline Vf first_of(Vf pair) {
  return reinterpret_cast<Vf>(reinterpret_cast<Vu>(pair) << 16);
}
inline Vf second_of(Vf pair) {
  return reinterpret_cast<Vf>(reinterpret_cast<Vu>(pair) & kUpperHalf);
}

// x [depth, columns] → pairs [⌈depth/2⌉, columns]; an odd depth ends with zeros.
inline void make_pairs(const float* x, int64_t depth, int64_t columns, float* pairs) {
  for (int64_t c = 0; c < depth; c += 2) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      const Mask mask = first_lanes(columns - i < kLanes ? columns - i : kLanes);
      const float* at = x + c * columns + i;
      const Vf second = c + 1 < depth ? load(at + columns, mask) : zero();
      store(pairs + c / 2 * columns + i, mask, pair_of(load(at, mask), second));
    }
  }
}

#if defined(SB_ISA_avx512)
#define SB_TARGET_BF16 __attribute__((target("avx512bf16")))

inline bool has_bf16_products() {
  static const bool has = __builtin_cpu_supports("avx512bf16") != 0;
  return has;
}
#endif

}  // namespace sb::SB_ISA
