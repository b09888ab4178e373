#pragma once

// What the device tells the sanitizers, which cannot see it: who may run after whom (thread sanitizer) and what may not
// be touched (address sanitizer). Without a sanitizer nothing.

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__) || defined(SOFTGPU_ASAN)
#define SOFTGPU_ASAN 1
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
extern "C" void* __asan_region_is_poisoned(void*, size_t);
#endif
#if defined(__SANITIZE_THREAD__) || defined(SOFTGPU_TSAN)
#define SOFTGPU_TSAN 1
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
extern "C" void* __tsan_get_current_fiber();
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void*);
extern "C" void __tsan_switch_to_fiber(void*, unsigned flags);
#endif

namespace softgpu {

#ifdef SOFTGPU_TSAN
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// What came before happened_before(at) is over for whoever passes happens_after(at) later.
inline void happened_before([[maybe_unused]] const void* at) {
#ifdef SOFTGPU_TSAN
  __tsan_release(const_cast<void*>(at));
#endif
}
inline void happens_after([[maybe_unused]] const void* at) {
#ifdef SOFTGPU_TSAN
  __tsan_acquire(const_cast<void*>(at));
#endif
}

inline void poison([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef SOFTGPU_ASAN
  __asan_poison_memory_region(memory, bytes);
#endif
}
inline void unpoison([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef SOFTGPU_ASAN
  __asan_unpoison_memory_region(memory, bytes);
#endif
}

}  // namespace softgpu
