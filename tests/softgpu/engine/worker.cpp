#include "softgpu/engine/worker.h"

#include <cstdint>
#include <iterator>

#include "softgpu/engine/quiet.h"

namespace softgpu {

Worker::~Worker() {
#ifdef SOFTGPU_TSAN
  if (context_ != nullptr) __tsan_destroy_fiber(context_);
#endif
}

#ifdef SOFTGPU_TSAN
namespace {
constexpr unsigned kNoOrder = 1;
}

const void* issue() {
  static uint64_t issued[4096];  // used again when it is long over
  static size_t next = 0;
  const void* at = &issued[next++ % std::size(issued)];
  happened_before(at);
  return at;
}

Worker::Turn::Turn(Worker& worker) : before_(__tsan_get_current_fiber()) {
  if (worker.context_ == nullptr) {
    worker.context_ = __tsan_create_fiber(kNoOrder);
    __tsan_switch_to_fiber(worker.context_, kNoOrder);
    be_quiet();  // for good: it is only ever in the engine
    return;
  }
  __tsan_switch_to_fiber(worker.context_, kNoOrder);
}
Worker::Turn::~Turn() {
  __tsan_switch_to_fiber(before_, kNoOrder);
}
#else
const void* issue() {
  return nullptr;
}
Worker::Turn::Turn(Worker&) {}
Worker::Turn::~Turn() {}
#endif

Worker& next_worker() {
  static auto* workers = new Worker[16];  // never destroyed: what is destroyed at exit still runs kernels
  static size_t next = 0;
  return workers[next++ % 16];
}

}  // namespace softgpu

#ifdef SOFTGPU_TSAN
// What the compiler calls for volatile memory (cmake/softgpu.cmake), which is read beside atomics and does not race.
extern "C" {
void __tsan_volatile_read4(void*) {}
void __tsan_volatile_write4(void*) {}
// The first race ends the program: what comes after it has another order. (The report of a fault comes in a handler.)
const char* __tsan_default_options() {
  return "halt_on_error=1:report_signal_unsafe=0:history_size=0";
}
}
#endif
