#include "softgpu/engine/shared_memory.h"

#include <cstdlib>
#include <cstring>

#include "softgpu/engine/state.h"
#include "softgpu/interface/device.h"

namespace softgpu {
namespace {

constexpr size_t kGap = 32;  // between two variables, not to be touched
constexpr size_t kMostAlignment = 1024;

size_t rounded(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

SharedMemory::~SharedMemory() {
  release();
}

void SharedMemory::release() {
  if (base_ == nullptr) return;
  unpoison(base_, kEnd);
  std::free(base_);
  base_ = nullptr;
}

void SharedMemory::end() {
#ifdef SOFTGPU_TSAN
  release();  // or it would take the next block for one that races with this one
#endif
}

void SharedMemory::open(size_t at, size_t bytes) {
  unpoison(base_ + at, bytes);
  std::memset(base_ + at, 0xFF, bytes);
}

void SharedMemory::start(SharedLayout& layout) {
  if (base_ == nullptr) {
    base_ = static_cast<unsigned char*>(std::aligned_alloc(kMostAlignment, kEnd));
    if (base_ == nullptr) std::abort();
  }
  layout_ = &layout;
  if (layout.end == 0) layout.end = kBegin;
  poison(base_, kEnd);
  if (layout.dynamic_at != 0) open(layout.dynamic_at, layout.dynamic_bytes);
  for (const auto& [variable, at] : layout.variables) open(at, variable->bytes);
}

// A kernel gets the alignment that it asks for and no more, which it could owe to luck.
unsigned char* SharedMemory::dynamic_room(size_t alignment) {
  if (alignment > kMostAlignment || (alignment & (alignment - 1)) != 0) fail("shared memory aligned to %zu", alignment);
  SharedLayout& layout = *layout_;
  if (layout.dynamic_at == 0) {
    size_t at = rounded(layout.end, kMostAlignment);
    if (alignment < kMostAlignment) at += alignment;
    layout.dynamic_at = at;
    layout.end = at + layout.dynamic_bytes;
    if (layout.end > kEnd) fail("%zu bytes of shared memory do not fit", layout.dynamic_bytes);
    open(at, layout.dynamic_bytes);
  }
  if (layout.dynamic_at % alignment != 0)
    fail("dynamic shared memory aligned to %zu, after it was aligned to less elsewhere in the kernel", alignment);
  return base_ + layout.dynamic_at;
}

unsigned char* SharedMemory::room(SharedVariable& variable) {
  SharedLayout& layout = *layout_;
  const auto [found, is_new] = layout.variables.try_emplace(&variable, 0);
  if (is_new) {
    const DeviceLimits& limits = device_limits();
    layout.static_bytes += rounded(variable.bytes, variable.alignment);
    if (layout.static_bytes > limits.shared_per_block ||
        layout.static_bytes + layout.dynamic_bytes > limits.shared_per_block_most)
      fail("%zu bytes of shared variables and %zu of dynamic shared memory: more than a block can have",
           layout.static_bytes, layout.dynamic_bytes);
    found->second = rounded(layout.end + kGap, variable.alignment);
    layout.end = found->second + variable.bytes;
    if (layout.end > kEnd) fail("%zu bytes of shared memory do not fit", layout.end);
    // Blocks that run have no such variable yet.
    for (Block* block : engine.block->grid->resident) block->memory.open(found->second, variable.bytes);
  }
  variable.launch = engine.block->grid->launch;
  variable.offset = found->second;
  return base_ + found->second;
}

// --- as kernels call it ----------------------------------------------------------------------------------------------

unsigned char* shared_room(SharedVariable& variable) {
  const Quiet quiet;
  Block& block = *engine.block;
  if (variable.launch == block.grid->launch) return block.memory.base() + variable.offset;
  return block.memory.room(variable);
}
unsigned char* dynamic_shared_room(size_t alignment) {
  const Quiet quiet;
  return engine.block->memory.dynamic_room(alignment);
}

uint32_t window(const void* p) {
  const SharedMemory& memory = engine.block->memory;
  if (!memory.holds(p)) fail("%p is not in the block's shared memory", p);
  return memory.address(p);
}
void* from_window(uint32_t address, size_t bytes) {
  void* p = engine.block->memory.at(address, bytes);
  if (p == nullptr) fail("%zu bytes at %x are not in the block's shared memory", bytes, address);
  if (address % bytes != 0) fail("%zu bytes at %x of shared memory, not aligned", bytes, address);
  return p;
}

}  // namespace softgpu
