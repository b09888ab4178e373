#include "softgpu/engine/fibre.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "softgpu/interface/sanitizers.h"

#ifdef SOFTGPU_ASAN
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
#endif

// void softgpu_switch(void** save, void* to): what a function must keep goes on the stack, then the stack is another.
extern "C" void softgpu_switch(void** save, void* to);
asm(R"(
.text
.globl softgpu_switch
.type softgpu_switch,@function
softgpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size softgpu_switch,.-softgpu_switch
)");

namespace softgpu {
namespace {

#if defined(SOFTGPU_ASAN) || defined(SOFTGPU_TSAN)
constexpr size_t kStack = 512 << 10;  // their frames are larger
#else
constexpr size_t kStack = 128 << 10;
#endif
constexpr size_t kGuard = 4096;

}  // namespace

Fibre::~Fibre() {
  if (stack_ != nullptr) munmap(stack_, kStack);
#ifdef SOFTGPU_TSAN
  if (context_ != nullptr && !adopted_) __tsan_destroy_fiber(context_);
#endif
}

void Fibre::prepare(void (*main)(), int number) {
  if (stack_ == nullptr) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
      std::perror("softgpu: the stack of a thread");
      std::abort();
    }
    stack_ = static_cast<char*>(memory);
    bottom_ = stack_ + kGuard;
    size_ = kStack - kGuard;
#ifdef SOFTGPU_TSAN
    context_ = __tsan_create_fiber(0);
#endif
  }
  // A stack that begins at the same place of its pages as all others shares their lines of the cache.
  const size_t shift = static_cast<size_t>(number) % 16 * 1088;
  auto top = reinterpret_cast<void**>(stack_ + kStack - 64 - shift);
  *--top = nullptr;  // as after a call: 8 bytes below a multiple of 16
  *--top = reinterpret_cast<void*>(main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
}

void Fibre::adopt_thread() {
  adopted_ = true;
#ifdef SOFTGPU_ASAN
  pthread_attr_t attributes;
  void* bottom = nullptr;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) std::abort();
  pthread_attr_getstack(&attributes, &bottom, &size_);
  pthread_attr_destroy(&attributes);
  bottom_ = bottom;
#endif
#ifdef SOFTGPU_TSAN
  context_ = __tsan_get_current_fiber();
#endif
}

void Fibre::switch_to(Fibre& to, [[maybe_unused]] bool ends) {
#ifdef SOFTGPU_TSAN
  __tsan_switch_to_fiber(to.context_, 1);  // 1: no order between the two but what the device says itself
#endif
#ifdef SOFTGPU_ASAN
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack_, to.bottom_, to.size_);
#endif
  softgpu_switch(&stack_pointer_, to.stack_pointer_);
#ifdef SOFTGPU_ASAN
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fibre::entered() {
#ifdef SOFTGPU_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace softgpu
