#pragma once

// What the engine says to the sanitizers, which do not look at it: its own memory goes from fibre to fibre. While a
// thread is in the engine (Quiet), the thread sanitizer sees no memory; reads() and writes() say what is touched in a
// kernel's name.

#include <cstddef>
#include <cstdint>

#include "softgpu/interface/sanitizers.h"

#ifdef SOFTGPU_TSAN
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();
extern "C" void __tsan_read_range(void*, size_t);
extern "C" void __tsan_write_range(void*, size_t);
extern "C" uint32_t __tsan_atomic32_load(const volatile uint32_t*, int order);
extern "C" void __tsan_atomic32_store(volatile uint32_t*, uint32_t, int order);
#endif
#ifdef SOFTGPU_ASAN
extern "C" void __asan_report_load_n(void*, size_t);
extern "C" void __asan_report_store_n(void*, size_t);
#endif

namespace softgpu {

inline void be_quiet() {
#ifdef SOFTGPU_TSAN
  __tsan_ignore_thread_begin();
#endif
}
inline void be_seen() {
#ifdef SOFTGPU_TSAN
  __tsan_ignore_thread_end();
#endif
}

class Quiet {
 public:
  Quiet() { be_quiet(); }
  ~Quiet() { be_seen(); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};

inline void reads([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef SOFTGPU_ASAN
  if (bytes > 0)
    if (void* bad = __asan_region_is_poisoned(const_cast<void*>(memory), bytes); bad != nullptr)
      __asan_report_load_n(bad, 1);
#endif
#ifdef SOFTGPU_TSAN
  be_seen();
  __tsan_read_range(const_cast<void*>(memory), bytes);
  be_quiet();
#endif
}
inline void writes([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef SOFTGPU_ASAN
  if (bytes > 0)
    if (void* bad = __asan_region_is_poisoned(memory, bytes); bad != nullptr) __asan_report_store_n(bad, 1);
#endif
#ifdef SOFTGPU_TSAN
  be_seen();
  __tsan_write_range(memory, bytes);
  be_quiet();
#endif
}
// An atomic addition, which does not race with others.
inline void adds([[maybe_unused]] float* to, [[maybe_unused]] size_t count) {
#ifdef SOFTGPU_ASAN
  writes(to, count * sizeof(float));
#endif
#ifdef SOFTGPU_TSAN
  be_seen();
  auto* bits = reinterpret_cast<uint32_t*>(to);
  for (size_t i = 0; i < count; ++i) __tsan_atomic32_store(bits + i, __tsan_atomic32_load(bits + i, 0), 0);
  be_quiet();
#endif
}

}  // namespace softgpu
