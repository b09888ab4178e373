#pragma once

// Atomic operations and loads past a cache. One thread of the host runs a device's threads, which change only where
// they meet: between two of these nobody else comes. For the thread sanitizer they are atomics, which do not race.

#include <bit>
#include <cstdint>
#include <type_traits>

#include "softgpu/cuda/engine.h"
#include "softgpu/interface/sanitizers.h"

namespace softgpu {

template <typename T, typename Change>
T fetch(T* at, Change change) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0)
    fail("an atomic operation at %p, not aligned", static_cast<void*>(at));
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  if constexpr (kThreadSanitizer) note_atomic(at);
  auto* bits = reinterpret_cast<Bits*>(at);
  const T was = std::bit_cast<T>(__atomic_load_n(bits, __ATOMIC_RELAXED));
  __atomic_store_n(bits, std::bit_cast<Bits>(change(was)), __ATOMIC_RELAXED);
  return was;
}

}  // namespace softgpu

template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T was) { return static_cast<T>(was + value); });
}
template <typename T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T was) { return was > value ? was : value; });
}
template <typename T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T was) { return was < value ? was : value; });
}
template <typename T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T was) { return static_cast<T>(was | value); });
}
template <typename T>
T atomicAnd(T* at, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T was) { return static_cast<T>(was & value); });
}
template <typename T>
T atomicExch(T* at, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T) { return value; });
}
template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return softgpu::fetch(at, [&](T was) { return was == expected ? value : was; });
}

// Memory has one order here, in which everything is seen as it is written. The thread sanitizer knows of fences.
inline void __threadfence() {
  softgpu::fence();
}
inline void __threadfence_block() {
  softgpu::fence();
}

template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
