#include "core/memory_plan.h"

#include <fmt/format.h>

#include "core/errors.h"

namespace sb {

std::string format_bytes(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, units[unit]);
}

void MemoryPlan::add(std::string name, int64_t bytes) {
  SB_CHECK(bytes >= 0, "{}: {} bytes", name, bytes);
  items_.push_back({std::move(name), bytes});
}

int64_t MemoryPlan::total() const {
  int64_t sum = 0;
  for (const Item& item : items_) sum += item.bytes;
  return sum;
}

void MemoryPlan::add_on_host(std::string name, int64_t bytes) {
  SB_CHECK(bytes >= 0, "{}: {} bytes", name, bytes);
  if (bytes > 0) on_host_.push_back({std::move(name), bytes});
}

int64_t MemoryPlan::host_total() const {
  int64_t sum = 0;
  for (const Item& item : on_host_) sum += item.bytes;
  return sum;
}

std::string MemoryPlan::table(int64_t limit_bytes) const {
  std::string text;
  for (const Item& item : items_) text += fmt::format("  {:<28} {:>12}\n", item.name, format_bytes(item.bytes));
  text += fmt::format("  {:<28} {:>12}", "total", format_bytes(total()));
  if (limit_bytes > 0) text += fmt::format("  of {} available", format_bytes(limit_bytes));
  text += "\n";
  for (const Item& item : on_host_)
    text += fmt::format("  {:<28} {:>12}  in host memory\n", item.name, format_bytes(item.bytes));
  return text;
}

void MemoryPlan::check_fits(int64_t limit_bytes, const std::string& cure) const {
  if (limit_bytes > 0 && total() > limit_bytes) {
    throw OutOfMemory("the memory plan does not fit:\n{}{}", table(limit_bytes), cure);
  }
}

}  // namespace sb
