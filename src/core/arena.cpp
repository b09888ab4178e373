#include "core/arena.h"

#include <algorithm>
#include <cstdlib>

namespace sb {

Arena::Arena(std::string name, int64_t capacity) : name_(std::move(name)), capacity_(rounded(capacity)) {
  SB_CHECK(capacity >= 0, "arena {}: capacity {}", name_, capacity);
  if (capacity_ == 0) return;
  owned_ = {std::aligned_alloc(kAlignment, static_cast<size_t>(capacity_)), std::free};
  if (!owned_) throw OutOfMemory("arena {}: the system refused {} bytes", name_, capacity_);
  memory_ = static_cast<char*>(owned_.get());
}

Arena::Arena(std::string name, void* memory, int64_t capacity, DeviceKind device)
    : name_(std::move(name)), memory_(static_cast<char*>(memory)), capacity_(capacity), device_(device) {}

Arena::Arena(std::string name, std::shared_ptr<void> memory, int64_t capacity, DeviceKind device)
    : Arena(std::move(name), memory.get(), capacity, device) {
  owned_ = std::move(memory);
}

void* Arena::allocate_bytes(int64_t bytes) {
  SB_CHECK(bytes >= 0, "arena {}: {} bytes asked for", name_, bytes);
  const int64_t size = rounded(bytes);
  if (size > capacity_ - used_) {
    throw OutOfMemory("arena {}: {} bytes asked for, {} of {} in use; the memory plan was too small", name_, size,
                      used_, capacity_);
  }
  void* result = memory_ + used_;
  used_ += size;
  high_water_ = std::max(high_water_, used_);
  return result;
}

TensorView Arena::allocate(DType dtype, Shape shape) {
  return {allocate_bytes(shape.elements() * dtype_bytes(dtype)), dtype, shape, device_};
}

void Arena::release(int64_t mark) {
  SB_CHECK(0 <= mark && mark <= used_, "arena {}: release to {} while {} in use", name_, mark, used_);
  used_ = mark;
}

}  // namespace sb
