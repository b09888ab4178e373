#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

// What a rank will allocate, listed before step 1.
class MemoryPlan {
 public:
  struct Item {
    std::string name;
    int64_t bytes;
  };

  void add(std::string name, int64_t bytes);
  // Host memory beside a device: not in the total. Nothing when there are no bytes.
  void add_on_host(std::string name, int64_t bytes);
  int64_t total() const;
  int64_t host_total() const;
  const std::vector<Item>& items() const { return items_; }

  // A table for people: one line an item, the total, and the limit where it is known (0: unknown).
  std::string table(int64_t limit_bytes = 0) const;
  // Throws OutOfMemory with the table and `cure` when the total exceeds the limit.
  void check_fits(int64_t limit_bytes, const std::string& cure) const;

 private:
  std::vector<Item> items_, on_host_;
};

// "1.50 GiB"
std::string format_bytes(int64_t bytes);

}  // namespace sb
