#pragma once

// The switch at every site of the mutated sources (mutate/sites.py): which one is wrong in this process is said by
// MUTANT. With MUTANT_REACHED=FILE every site that is come to is written there at the end, once for every instance of a
// template that comes to it: "12 void kernel(Args) [with int D = 64]".

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <source_location>
#include <utility>

namespace mutant {

class Switches {
 public:
  Switches() : file_(std::getenv("MUTANT_REACHED")) {
    if (const char* number = std::getenv("MUTANT")) active_ = std::atoi(number);
  }
  ~Switches() {
    std::FILE* const file = file_ ? std::fopen(file_, "a") : nullptr;
    if (!file) return;
    for (const auto& [id, function] : reached_) std::fprintf(file, "%d %s\n", id, function);
    std::fclose(file);
  }

  bool is(int id, const char* function) {
    if (file_) note(id, function);
    return id == active_;
  }

 private:
  using Place = std::pair<int, const char*>;

  void note(int id, const char* function) {
    const Place place{id, function};
    Place& last =
        noted_[(static_cast<uintptr_t>(id) * 31 + reinterpret_cast<uintptr_t>(function) / 16) % noted_.size()];
    if (last == place) return;
    const std::lock_guard lock(mutex_);
    reached_.insert(place);
    last = place;
  }

  const char* const file_;
  int active_ = -1;
  std::array<Place, 4096> noted_ = {};  // so that most calls need no lock; a race costs another look
  std::mutex mutex_;
  std::set<Place> reached_;
};

inline Switches switches;

inline bool is(int id, const char* function = std::source_location::current().function_name()) {
  return switches.is(id, function);
}

// A stream's own order is lost on the default one: ours are created so that they do not wait for it. What is on the
// default one already is no mutant.
template <typename Stream>
Stream stream(int id, Stream right, const char* function = std::source_location::current().function_name()) {
  return right != Stream{} && is(id, function) ? Stream{} : right;
}

}  // namespace mutant
