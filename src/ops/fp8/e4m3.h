#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace sb {

// e4m3: a sign, 4 bits of exponent, 3 of mantissa; up to 448, down to 2⁻⁹, no infinity, 0x7f is no number.
inline constexpr float kLargestE4m3 = 448.0f;
inline constexpr uint8_t kNotANumberE4m3 = 0x7f;

inline float float_from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((code & 0x7f) == kNotANumberE4m3) magnitude = NAN;
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest code, ties to the even one; beyond the largest the largest, as the GPU's conversion does. Infinity is
// beyond, and what is no number stays none.
inline uint8_t e4m3_from_float(float value) {
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 0x80 : 0);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint8_t>(sign | kNotANumberE4m3);
  if (magnitude >= kLargestE4m3) return sign | 0x7e;
  // Codes of one exponent lie 2^(exponent - 3) apart, subnormal ones as those of exponent -6.
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  // In units of that distance: 0 to 16. The default rounding is to the nearest, ties to even.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + units));
}

// What a tensor whose largest magnitude is `largest` is multiplied by before rounding, and what a code is worth then.
// Smaller tensors than 2⁻¹⁰⁰ are treated as if they reached it: the factor stays finite.
struct Fp8Scale {
  float factor, worth;
};
inline Fp8Scale fp8_scale(float largest) {
  const float reached = largest < 0x1p-100f ? 0x1p-100f : largest;
  return {kLargestE4m3 / reached, reached / kLargestE4m3};
}

}  // namespace sb
