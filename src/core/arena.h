#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/tensor.h"

namespace sb {

// One block of memory, sized before step 1, handed out front to back and freed back to front. `high_water()` is what
// the memory plan is checked against. Not thread-safe: one owner.
class Arena {
 public:
  static constexpr int64_t kAlignment = 64;

  // Host memory of `capacity` bytes. `name` appears in errors and in the memory plan.
  Arena(std::string name, int64_t capacity);
  // Memory owned by somebody else (a slice of a larger arena).
  Arena(std::string name, void* memory, int64_t capacity, DeviceKind device);
  // Memory that comes with its owner (device memory; see device/memory.h).
  Arena(std::string name, std::shared_ptr<void> memory, int64_t capacity, DeviceKind device);

  TensorView allocate(DType dtype, Shape shape);
  template <typename T>
  T* allocate_array(int64_t count) {
    return static_cast<T*>(allocate_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  void* allocate_bytes(int64_t bytes);

  // Everything allocated after mark() goes with release(mark).
  int64_t mark() const { return used_; }
  void release(int64_t mark);

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t high_water() const { return high_water_; }
  const std::string& name() const { return name_; }

  // Bytes `bytes` takes inside an arena (rounded up to the alignment), for planning.
  static int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  std::string name_;
  std::shared_ptr<void> owned_;
  char* memory_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t high_water_ = 0;
  DeviceKind device_ = DeviceKind::cpu;
};

// Frees a temporary allocation at the end of a scope.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  int64_t mark_;
};

// What an array takes of an arena.
inline int64_t array_bytes(int64_t elements, DType dtype) {
  return Arena::rounded(elements * dtype_bytes(dtype));
}

}  // namespace sb
