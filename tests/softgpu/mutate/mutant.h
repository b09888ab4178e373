#pragma once

// The switch at every site of the mutated sources (mutate/sites.py): which one is wrong in this process is said by
// MUTANT. With MUTANT_REACHED=FILE the numbers of all sites that were come to are written there at the end.

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace mutant {

class Switches {
 public:
  static constexpr int kMost = 4096;

  Switches() {
    if (const char* number = std::getenv("MUTANT")) active_ = std::atoi(number);
  }
  ~Switches() {
    const char* const path = std::getenv("MUTANT_REACHED");
    std::FILE* const file = path ? std::fopen(path, "a") : nullptr;
    if (!file) return;
    for (int id = 0; id < kMost; ++id)
      if (reached_[id].load(std::memory_order_relaxed)) std::fprintf(file, "%d\n", id);
    std::fclose(file);
  }

  bool is(int id) {
    reached_[id].store(true, std::memory_order_relaxed);
    return id == active_;
  }

 private:
  int active_ = -1;
  std::atomic<bool> reached_[kMost] = {};
};

inline Switches switches;

inline bool is(int id) {
  return switches.is(id);
}

// A stream's own order is lost on the default one: ours are created so that they do not wait for it.
template <typename Stream>
Stream stream(int id, Stream right) {
  return is(id) ? Stream{} : right;
}

}  // namespace mutant
