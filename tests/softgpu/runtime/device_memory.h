#pragma once

// The memory of the software device and page-locked host memory. Every allocation ends at a page that nobody may touch,
// is filled with a pattern that spoils whatever is computed from it, and its addresses are not given out again for a
// long time, so that what reaches beyond it or outlives it faults. Guarded by the scheduler's lock.

#include <cstddef>
#include <deque>
#include <map>
#include <string>

namespace softgpu {

struct Allocation {
  enum class Kind { device, page_locked };
  char* begin = nullptr;
  size_t bytes = 0;
  Kind kind = Kind::device;
  int device = 0;
  char* pages = nullptr;  // that hold it
  size_t page_bytes = 0;
  size_t closed_from = 0, closed_to = 0;  // of these: nobody may touch them now
};

class DeviceMemory {
 public:
  static DeviceMemory& get();

  // Null: there is no room for it.
  char* allocate(size_t bytes, Allocation::Kind kind, int device);
  // Ends the program where something wrote beside it; false: no such allocation.
  bool release(void* memory, Allocation::Kind kind);

  // The allocation that has all these bytes; null: none has.
  const Allocation* holding(const void* memory, size_t bytes) const;
  // Whether the address is one that the device gives out, now or at other times.
  bool has(const void* address) const;
  size_t used(int device) const;

  // While the device works, its memory can be touched; else not even by the host's code.
  void open();
  void close();

  // What an address in the device's range is, for the report of a fault; empty: it is not in there. Takes no lock.
  std::string describe(const void* address) const;
  bool is_open() const { return open_; }

 private:
  DeviceMemory();
  char* place_for(size_t bytes);
  void fill(char* pages, size_t bytes);
  void close(Allocation& allocation, size_t from, size_t to) const;
  void open(Allocation& allocation) const;
  void check_borders(const Allocation& allocation) const;

  char *begin_ = nullptr, *end_ = nullptr, *next_ = nullptr;
  int pattern_file_ = -1;
  std::map<const char*, Allocation> live_;  // by begin
  std::deque<Allocation> freed_;            // the latest ones
  bool open_ = true;
  size_t window_ = 0;  // where the pages begin that are closed next, of more than can be closed each time
};

}  // namespace softgpu
