#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/errors.h"

namespace sb {
namespace {

// Loops follow each other within microseconds during a step, and waking a sleeping thread can take longer than the loop
// itself: waits some three times as long as that takes before sleeping. After the first microseconds the core is
// offered to others, which matters when there are more threads than cores.
template <typename Condition>
bool spin_until(const Condition& condition) {
  for (int i = 0; i < 500; ++i) {
    if (condition()) return true;
    __builtin_ia32_pause();
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(150);
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 8; ++i) {
      if (condition()) return true;
      sched_yield();
    }
  }
  return condition();
}

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable wake, done;
  std::vector<std::thread> workers;
  const std::function<void(int64_t, int64_t, int)>* body = nullptr;
  int64_t count = 0, grain = 1;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> generation{0};
  // Workers inside the current loop, and whether more may enter. A worker that the system has not got round to waking
  // finds the loop closed and is not waited for.
  static constexpr uint32_t kOpen = 1u << 31;
  std::atomic<uint32_t> gate{0};
  bool stop = false;
  std::exception_ptr failure;

  void work(int thread) {
    while (true) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      try {
        (*body)(begin, std::min(begin + grain, count), thread);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
  }

  void loop(int thread) {
    uint64_t seen = 0;
    while (true) {
      if (!spin_until([&] { return generation.load(std::memory_order_acquire) != seen; })) {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation.load(std::memory_order_acquire) != seen; });
        if (stop) return;
      }
      seen = generation.load(std::memory_order_acquire);
      if (!enter()) continue;
      work(thread);
      if (gate.fetch_sub(1, std::memory_order_acq_rel) == 1) {  // the last one out of a closed loop
        const std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }

  void end() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
      generation.fetch_add(0);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }

  bool enter() {
    uint32_t inside = gate.load(std::memory_order_acquire);
    while (inside & kOpen) {
      if (gate.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()), threads_(threads) {
  SB_CHECK(threads >= 1, "{} threads", threads);
  try {
    for (int i = 1; i < threads; ++i) state_->workers.emplace_back([this, i] { state_->loop(i); });
  } catch (const std::system_error& error) {
    const size_t started = state_->workers.size() + 1;
    state_->end();
    throw UserError(
        "{} threads were requested, but the system starts no more than {} ({}): lower train.threads (--threads, "
        "--workers), or raise the limit of processes (ulimit -u, pids.max of the control group)",
        threads, started, error.code().message());
  }
}

ThreadPool::~ThreadPool() {
  state_->end();
}

void ThreadPool::parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  State& s = *state_;
  if (threads_ == 1 || count <= grain) {
    for (int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(begin + grain, count), 0);
    return;
  }
  {
    const std::lock_guard lock(s.mutex);
    s.body = &body;
    s.count = count;
    s.grain = grain;
    s.next.store(0, std::memory_order_relaxed);
    s.failure = nullptr;
    s.gate.store(State::kOpen, std::memory_order_release);
    s.generation.fetch_add(1, std::memory_order_release);
  }
  s.wake.notify_all();
  s.work(0);
  s.gate.fetch_and(~State::kOpen, std::memory_order_acq_rel);
  const auto empty = [&] { return s.gate.load(std::memory_order_acquire) == 0; };
  if (!spin_until(empty)) {
    std::unique_lock lock(s.mutex);
    s.done.wait(lock, empty);
  }
  if (s.failure) std::rethrow_exception(std::exchange(s.failure, nullptr));
}

void ThreadPool::parallel_slices(int64_t count, const std::function<void(int64_t, int64_t, int)>& body) {
  const int64_t pieces = std::min<int64_t>(threads_, count);
  if (pieces <= 0) return;
  parallel_for(pieces, 1, [&](int64_t piece, int64_t, int thread) {
    body(count * piece / pieces, count * (piece + 1) / pieces, thread);
  });
}

std::vector<int> usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return {0};
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

int available_cores() {
  return std::max(1, static_cast<int>(usable_cores().size()));
}

}  // namespace sb
