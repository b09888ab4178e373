#include "softgpu/runtime/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "softgpu/interface/kernel.h"
#include "softgpu/interface/sanitizers.h"
#include "softgpu/runtime/device_model.h"
#include "softgpu/runtime/faults.h"

namespace softgpu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;  // what CUDA promises, and no more
#ifdef SOFTGPU_TSAN
constexpr size_t kAddresses = size_t{64} << 30;  // every address has shadows
#else
constexpr size_t kAddresses = size_t{1} << 40;
#endif
// From here on memory is mapped from a file of the pattern: what is not touched then takes none of the machine's.
constexpr size_t kLarge = size_t{4} << 20;
constexpr size_t kPatternFile = size_t{16} << 20;
constexpr unsigned char kBorder = 0xA7;
constexpr size_t kFreedKept = 4096;
constexpr size_t kClosedWhole = size_t{32} << 20, kWindow = size_t{4} << 20;

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

void poison_borders(const Allocation& a) {
  poison(a.pages, static_cast<size_t>(a.begin - a.pages));
  poison(a.begin + a.bytes, static_cast<size_t>(a.pages + a.page_bytes - a.begin) - a.bytes);
}

void must(bool well, const char* what) {
  if (well) return;
  std::perror("softgpu");
  fail("%s", what);
}

void* no_access(void* at, size_t bytes) {
  const int fixed = at != nullptr ? MAP_FIXED : 0;
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

}  // namespace

DeviceMemory& DeviceMemory::get() {
  // Never destroyed: what is destroyed at exit still frees memory.
  static auto* memory = new DeviceMemory;
  return *memory;
}

DeviceMemory::DeviceMemory() {
  begin_ = static_cast<char*>(no_access(nullptr, kAddresses));
  must(begin_ != MAP_FAILED, "no addresses for the device's memory");
  report_faults();
  next_ = begin_;
  end_ = begin_ + kAddresses;
}

// Addresses behind those given out last, from the beginning again at the end; with a page before and behind them.
char* DeviceMemory::place_for(size_t bytes) {
  const size_t whole = bytes + 2 * kPage;
  if (whole > kAddresses / 2) return nullptr;
  char* from = next_;
  for (bool again = false;; again = true) {
    for (const auto& [begin, allocation] : live_) {
      char* const behind = allocation.pages + allocation.page_bytes + kPage;
      if (allocation.pages < from + whole && behind > from) from = behind;
    }
    if (from + whole <= end_) break;
    if (again) return nullptr;
    from = begin_;
    unpoison(begin_, kAddresses);  // as if nothing had been there
    for (const auto& [begin, allocation] : live_) poison_borders(allocation);
  }
  next_ = from + whole;
  return from + kPage;
}

void DeviceMemory::fill(char* pages, size_t bytes) {
  const unsigned char pattern = device_model().pattern;
  if (bytes < kLarge) {
    void* at = mmap(pages, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    must(at == pages, "no memory for the device");
    std::memset(pages, pattern, bytes);
    return;
  }
  if (pattern_file_ < 0) {
    pattern_file_ = memfd_create("softgpu pattern", MFD_CLOEXEC);
    must(pattern_file_ >= 0 && ftruncate(pattern_file_, kPatternFile) == 0, "no memory for the device");
    void* file = mmap(nullptr, kPatternFile, PROT_READ | PROT_WRITE, MAP_SHARED, pattern_file_, 0);
    must(file != MAP_FAILED, "no memory for the device");
    std::memset(file, pattern, kPatternFile);
    munmap(file, kPatternFile);
  }
  for (size_t done = 0; done < bytes; done += kPatternFile) {
    const size_t part = bytes - done < kPatternFile ? bytes - done : kPatternFile;
    void* at =
        mmap(pages + done, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, pattern_file_, 0);
    must(at == pages + done, "no memory for the device");
  }
}

char* DeviceMemory::allocate(size_t bytes, Allocation::Kind kind, int device) {
  const size_t page_bytes = rounded(rounded(bytes == 0 ? 1 : bytes, kAlignment), kPage);
  char* pages = place_for(page_bytes);
  if (pages == nullptr) return nullptr;
  fill(pages, page_bytes);
  Allocation made{.bytes = bytes, .kind = kind, .device = device, .pages = pages, .page_bytes = page_bytes};
  // At the end of its pages, as near as its alignment lets it.
  made.begin = pages + page_bytes - rounded(bytes == 0 ? 1 : bytes, kAlignment);
  std::memset(pages, kBorder, static_cast<size_t>(made.begin - pages));
  std::memset(made.begin + bytes, kBorder, static_cast<size_t>(pages + page_bytes - made.begin) - bytes);
  poison_borders(made);
  Allocation& kept = live_.emplace(made.begin, made).first->second;
  if (kind == Allocation::Kind::device && !open_) close(kept, 0, page_bytes);
  return made.begin;
}

void DeviceMemory::check_borders(const Allocation& a) const {
  const auto check = [&](const char* from, const char* to) {
    for (; from < to; ++from)  // (no library function: the address sanitizer knows these bytes as nobody's)
      if (static_cast<unsigned char>(*from) != kBorder)
        fail("something wrote %td bytes %s %zu bytes of %s at %p",
             from < a.begin ? a.begin - from : from - a.begin - static_cast<long>(a.bytes) + 1,
             from < a.begin ? "before the" : "beyond the", a.bytes,
             a.kind == Allocation::Kind::device ? "device memory" : "page-locked memory", static_cast<void*>(a.begin));
  };
  check(a.pages, a.begin);
  check(a.begin + a.bytes, a.pages + a.page_bytes);
}

bool DeviceMemory::release(void* memory, Allocation::Kind kind) {
  const auto found = live_.find(static_cast<char*>(memory));
  if (found == live_.end() || found->second.kind != kind) return false;
  open(found->second);
  const Allocation gone = found->second;
  check_borders(gone);
  no_access(gone.pages, gone.page_bytes);
  // Nobody can touch it; where the sanitizer hears of it, it says who tried. (Of much memory that takes too long.)
  if (gone.page_bytes < kLarge) poison(gone.pages, gone.page_bytes);
  live_.erase(found);
  freed_.push_back(gone);
  if (freed_.size() > kFreedKept) freed_.pop_front();
  return true;
}

const Allocation* DeviceMemory::holding(const void* memory, size_t bytes) const {
  const auto* at = static_cast<const char*>(memory);
  auto found = live_.upper_bound(at);
  if (found == live_.begin()) return nullptr;
  const Allocation& a = (--found)->second;
  return at + bytes <= a.begin + a.bytes ? &a : nullptr;
}

bool DeviceMemory::has(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  return at >= begin_ && at < end_;
}

size_t DeviceMemory::used(int device) const {
  size_t sum = 0;
  for (const auto& [begin, a] : live_)
    if (a.kind == Allocation::Kind::device && a.device == device) sum += a.page_bytes;
  return sum;
}

void DeviceMemory::close(Allocation& a, size_t from, size_t to) const {
  must(mprotect(a.pages + from, to - from, PROT_NONE) == 0, "protection of device memory");
  a.closed_from = from;
  a.closed_to = to;
}

void DeviceMemory::open(Allocation& a) const {
  if (a.closed_from == a.closed_to) return;
  must(mprotect(a.pages + a.closed_from, a.closed_to - a.closed_from, PROT_READ | PROT_WRITE) == 0,
       "protection of device memory");
  a.closed_from = a.closed_to = 0;
}

void DeviceMemory::open() {
  if (open_) return;
  open_ = true;
  for (auto& [begin, a] : live_) open(a);
}

// All of it, or of much a window that moves on: closing costs time by the page.
void DeviceMemory::close() {
  if (!open_) return;
  open_ = false;
  size_t all = 0;
  for (const auto& [begin, a] : live_)
    if (a.kind == Allocation::Kind::device) all += a.page_bytes;
  const bool whole = all <= kClosedWhole;
  size_t at = 0;  // of all memory, one allocation after the other
  for (auto& [begin, a] : live_) {
    if (a.kind != Allocation::Kind::device) continue;
    const size_t from = whole ? 0 : std::clamp(window_, at, at + a.page_bytes) - at,
                 to = whole ? a.page_bytes : std::clamp(window_ + kWindow, at, at + a.page_bytes) - at;
    if (from < to) close(a, from, to);
    at += a.page_bytes;
  }
  window_ = window_ + kWindow < all ? window_ + kWindow : 0;
}

std::string DeviceMemory::describe(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  if (!has(at)) return "";
  char text[200];
  const auto place = [&](const Allocation& a, const char* state) {
    const long offset = at - a.begin, size = static_cast<long>(a.bytes);
    std::snprintf(text, sizeof text, "%ld bytes %s the %zu bytes of %s%s at %p",
                  offset < 0      ? -offset
                  : offset < size ? offset
                                  : offset - size,
                  offset < 0      ? "before"
                  : offset < size ? "into"
                                  : "beyond",
                  a.bytes, state, a.kind == Allocation::Kind::device ? "device memory" : "page-locked memory",
                  static_cast<void*>(a.begin));
    return std::string(text);
  };
  const auto near = [&](const Allocation& a) { return at >= a.pages - kPage && at < a.pages + a.page_bytes + kPage; };
  for (const auto& [begin, a] : live_)
    if (near(a)) return place(a, "");
  for (auto a = freed_.rbegin(); a != freed_.rend(); ++a)
    if (near(*a)) return place(*a, "freed ");
  return "an address of the device that nobody has";
}

}  // namespace softgpu
