#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace sb {

// A fixed set of threads for data-parallel loops. The caller takes part, so a pool of one runs everything inline.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end, thread) over [0, count) in pieces of `grain` (at least 1), handed out dynamically: good for
  // uneven work. Blocks until all are done; the first exception is rethrown here. Not to be called from inside a body.
  void parallel_for(int64_t count, int64_t grain,
                    const std::function<void(int64_t begin, int64_t end, int thread)>& body);

  // One contiguous piece a thread: piece borders depend on `count` and threads() only.
  void parallel_slices(int64_t count, const std::function<void(int64_t begin, int64_t end, int thread)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
  int threads_;
};

// Cores this process may use (respects the affinity mask): which, and how many.
std::vector<int> usable_cores();
int available_cores();

}  // namespace sb
