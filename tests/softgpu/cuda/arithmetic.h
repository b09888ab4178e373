#pragma once

// Arithmetic that CUDA C++ has names for and C++ has not, and overloads of min and max.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

using std::isfinite;
using std::isinf;
using std::isnan;

// --- bits ------------------------------------------------------------------------------------------------------------
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline uint32_t __float_as_uint(float x) {
  return std::bit_cast<uint32_t>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __uint_as_float(uint32_t x) {
  return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
// Each nibble of `selector` picks a byte of y:x, or with its highest bit that byte's sign.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t all = uint64_t{y} << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> 4 * i & 15;
    uint32_t byte = all >> 8 * (pick & 7) & 255;
    if ((pick & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}

// --- several numbers in a word ---------------------------------------------------------------------------------------
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
inline int __vimax3_s32(int a, int b, int c) {
  return std::max({a, b, c});
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline unsigned __vminu2(unsigned a, unsigned b) {
  return std::min(a & 0xffff, b & 0xffff) | std::min(a >> 16, b >> 16) << 16;
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
  unsigned out = 0;
  for (int i = 0; i < 32; i += 8)
    if ((a >> i & 255) != (b >> i & 255)) out |= 255u << i;
  return out;
}

// --- floats: what a GPU only comes near to is exact here -------------------------------------------------------------
inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __log2f(float x) {
  return log2f(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsqrt_rn(float a) {
  return sqrtf(a);
}
inline float rsqrtf(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
inline float cospif(float x) {
  return static_cast<float>(std::cos(3.14159265358979323846 * x));
}
inline float sinpif(float x) {
  return static_cast<float>(std::sin(3.14159265358979323846 * x));
}
inline int __half2int_rn(__half x) {
  return static_cast<int>(nearbyintf(__half2float(x)));
}

// --- min and max, without std
// --------------------------------------------------------------------------------------------
#define SOFTGPU_MIN_MAX(T)    \
  constexpr T max(T a, T b) { \
    return a < b ? b : a;     \
  }                           \
  constexpr T min(T a, T b) { \
    return b < a ? b : a;     \
  }
SOFTGPU_MIN_MAX(int)
SOFTGPU_MIN_MAX(unsigned)
SOFTGPU_MIN_MAX(long)
SOFTGPU_MIN_MAX(unsigned long)
SOFTGPU_MIN_MAX(long long)
SOFTGPU_MIN_MAX(unsigned long long)
#undef SOFTGPU_MIN_MAX
constexpr unsigned max(int a, unsigned b) {
  return max(static_cast<unsigned>(a), b);
}
constexpr unsigned max(unsigned a, int b) {
  return max(a, static_cast<unsigned>(b));
}
constexpr unsigned min(int a, unsigned b) {
  return min(static_cast<unsigned>(a), b);
}
constexpr unsigned min(unsigned a, int b) {
  return min(a, static_cast<unsigned>(b));
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline float min(float a, float b) {
  return fminf(a, b);
}
inline double max(double a, double b) {
  return fmax(a, b);
}
inline double min(double a, double b) {
  return fmin(a, b);
}
