#pragma once

// Shuffles, votes and reductions of a warp.

#include <cstring>
#include <type_traits>

#include "softgpu/cuda/engine.h"

namespace softgpu {

template <typename T>
T shuffle(uint32_t mask, T value, int source) {
  static_assert(sizeof(T) <= 16 && std::is_trivially_copyable_v<T>);
  const Given given = collect(mask, &value, sizeof(T), Together::shuffle);
  if ((mask >> source & 1) == 0) fail("a shuffle from lane %d, which is not in the mask %08x", source, mask);
  T out;
  std::memcpy(&out, given[source], sizeof(T));
  return out;
}

template <typename T, typename Join>
T reduce(uint32_t mask, T value, Together what, Join join) {
  const Given given = collect(mask, &value, sizeof(T), what);
  const int first = __builtin_ctz(mask);
  T out, next;
  std::memcpy(&out, given[first], sizeof(T));
  for (int i = first + 1; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    std::memcpy(&next, given[i], sizeof(T));
    out = join(out, next);
  }
  return out;
}

}  // namespace softgpu

inline void __syncwarp(uint32_t mask = ~0u) {
  softgpu::collect(mask, nullptr, 0, softgpu::Together::sync);
}

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32) {
  const int lane = softgpu::lane();
  return softgpu::shuffle(mask, value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int distance, int width = 32) {
  const int lane = softgpu::lane(), from = lane ^ distance;
  return softgpu::shuffle(mask, value, from / width > lane / width ? lane : from);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned distance, int width = 32) {
  const int lane = softgpu::lane(), from = lane - static_cast<int>(distance);
  return softgpu::shuffle(mask, value, from < (lane & ~(width - 1)) ? lane : from);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned distance, int width = 32) {
  const int lane = softgpu::lane(), from = lane + static_cast<int>(distance);
  return softgpu::shuffle(mask, value, from > (lane | (width - 1)) ? lane : from);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const unsigned char given_here = predicate != 0 ? 1 : 0;
  const softgpu::Given given = softgpu::collect(mask, &given_here, 1, softgpu::Together::ballot);
  uint32_t out = 0;
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0) out |= uint32_t{given[i][0]} << i;
  return out;
}
inline int __any_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0 ? 1 : 0;
}
inline int __all_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask ? 1 : 0;
}

template <typename T>
T __reduce_add_sync(uint32_t mask, T value) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>);
  return softgpu::reduce(mask, value, softgpu::Together::add,
                         [](T a, T b) { return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); });
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>);
  return softgpu::reduce(mask, value, softgpu::Together::most, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
T __reduce_min_sync(uint32_t mask, T value) {
  static_assert(sizeof(T) == 4 && std::is_integral_v<T>);
  return softgpu::reduce(mask, value, softgpu::Together::least, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  const softgpu::Given given = softgpu::collect(mask, &value, sizeof(T), softgpu::Together::match);
  uint32_t out = 0;
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0 && std::memcmp(given[i], &value, sizeof(T)) == 0) out |= 1u << i;
  return out;
}
