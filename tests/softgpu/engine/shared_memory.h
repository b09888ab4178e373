#pragma once

// The shared memory of a block: what the launch asked for, then the kernel's own variables as they are first named.
// Every byte holds NaN when the block starts. With the address sanitizer nothing between them may be touched.

#include <cstddef>
#include <cstdint>
#include <map>

namespace softgpu {

struct SharedVariable;

// Where the variables of one kernel lie, the same in all its blocks.
struct SharedLayout {
  size_t dynamic_bytes = 0;
  size_t dynamic_at = 0;  // 0: nobody has named it yet
  size_t end = 0;         // of all
  size_t static_bytes = 0;
  std::map<const SharedVariable*, size_t> variables;
};

class SharedMemory {
 public:
  // Addresses begin behind what the system keeps, as on a GPU; products address 256 KiB.
  static constexpr size_t kBegin = 1024, kEnd = size_t{256} << 10;

  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // For a block whose kernel has this layout, which grows as variables are named.
  void start(SharedLayout& layout);
  void end();
  unsigned char* dynamic_room(size_t alignment);
  unsigned char* room(SharedVariable& variable);

  bool holds(const void* p) const {
    return static_cast<const unsigned char*>(p) >= base_ + kBegin &&
           static_cast<const unsigned char*>(p) < base_ + kEnd;
  }
  uint32_t address(const void* p) const { return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - base_); }
  // Null where these bytes are no one's.
  unsigned char* at(uint32_t address, size_t bytes) const {
    return address >= kBegin && address + bytes <= layout_->end ? base_ + address : nullptr;
  }
  unsigned char* base() const { return base_; }
  void open(size_t at, size_t bytes);

 private:
  void release();

  unsigned char* base_ = nullptr;
  SharedLayout* layout_ = nullptr;
};

}  // namespace softgpu
