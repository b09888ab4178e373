#pragma once

// For the thread sanitizer: the engine's own memory goes from fibre to fibre and is not to be looked at, but for what
// it says itself.

#include <cstddef>

#include "softgpu/interface/sanitizers.h"

#ifdef SOFTGPU_TSAN
extern "C" void __tsan_read_range(void*, size_t);
extern "C" void __tsan_write_range(void*, size_t);
#endif
#ifdef SOFTGPU_ASAN
extern "C" void __asan_report_load_n(void*, size_t);
extern "C" void __asan_report_store_n(void*, size_t);
#endif

namespace softgpu {

// The engine, which no sanitizer looks at, touches memory in a kernel's name.
inline void reads([[maybe_unused]] const void* memory, [[maybe_unused]] size_t bytes) {
#ifdef SOFTGPU_ASAN
  if (bytes > 0)
    if (void* bad = __asan_region_is_poisoned(const_cast<void*>(memory), bytes); bad != nullptr)
      __asan_report_load_n(bad, 1);
#endif
#ifdef SOFTGPU_TSAN
  __tsan_read_range(const_cast<void*>(memory), bytes);
#endif
}
inline void writes([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef SOFTGPU_ASAN
  if (bytes > 0)
    if (void* bad = __asan_region_is_poisoned(memory, bytes); bad != nullptr) __asan_report_store_n(bad, 1);
#endif
#ifdef SOFTGPU_TSAN
  __tsan_write_range(memory, bytes);
#endif
}

}  // namespace softgpu
