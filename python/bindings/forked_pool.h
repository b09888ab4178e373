#pragma once

#include <memory>
#include <mutex>

#include "core/thread_pool.h"

namespace sb::python {

// Threads that survive fork(): a child process has none of its parent's and takes new ones. One call at a time uses
// them.
class ForkedPool {
 public:
  struct Workers {
    explicit Workers(int threads) : pool(threads) {}
    ThreadPool pool;
    std::mutex busy;
  };

  explicit ForkedPool(int threads) : threads_(threads) {}
  // To be called with Python's lock.
  Workers& get();

 private:
  int threads_;
  long process_ = 0;
  std::unique_ptr<Workers> workers_;
};

}  // namespace sb::python
