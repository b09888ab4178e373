#pragma once

// A stack of its own for every thread of a kernel, and the switch between two of them: x86-64 only, without the
// system's help, since a kernel takes millions.

#include <cstddef>

namespace softgpu {

class Fibre {
 public:
  Fibre() = default;
  ~Fibre();
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  // The next switch to it calls `main`, which never returns. `number`: fibres of different numbers keep what they use
  // most in different lines of the cache.
  void prepare(void (*main)(), int number);
  // Makes of the calling thread's own stack what fibres come back to.
  void adopt_thread();

  // Goes on in `to`; returns when somebody switches back. `ends`: nobody will.
  void switch_to(Fibre& to, bool ends = false);
  // First call in a fibre's main.
  void entered();

 private:
  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;
  const void* bottom_ = nullptr;  // as the address sanitizer knows stacks
  size_t size_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* context_ = nullptr;  // the thread sanitizer's
  bool adopted_ = false;
};

}  // namespace softgpu
