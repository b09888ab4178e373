#include "python/bindings/forked_pool.h"

#include <unistd.h>

namespace sb::python {

ForkedPool::Workers& ForkedPool::get() {
  if (process_ != getpid()) {
    (void)workers_.release();  // the parent's threads: waiting for them would not end
    workers_ = std::make_unique<Workers>(threads_);
    process_ = getpid();
  }
  return *workers_;
}

}  // namespace sb::python
