#include "comm/device/device_engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>

#include "comm/reduce.h"
#include "device/cuda.h"

namespace sb {
namespace {

using Clock = DeviceGroup::Clock;

// Looks in a row that find nothing before the thread takes naps.
constexpr int kLooksBeforeNaps = 200;
// Made at the start: two for each operation that is under way, of which there are a few dozen.
constexpr int kEvents = 64;

}  // namespace

int64_t DeviceOperation::bytes() const {
  return count * comm_type_bytes(type);
}

std::chrono::nanoseconds waited_for(const DeviceOperation& operation, Clock::time_point begun) {
  const int64_t awaited = operation.awaited.load();
  if (awaited == 0) return {};
  return Clock::now() - std::max(begun, Clock::time_point(Clock::duration(awaited)));
}

void throw_timeout(int rank, std::chrono::milliseconds timeout, const DeviceOperation& operation) {
  throw CommTimeout(fmt::format("rank {} waited {:g} s for {}", rank, std::chrono::duration<double>(timeout).count(),
                                operation.text));
}

DeviceEngine::DeviceEngine(const DeviceCommOptions& options)
    : options_(options),
      device_index_(options.device == DeviceKind::cuda ? cuda::current_device() : 0),
      events_(options.device, kEvents) {
  sigset_t all, before;  // signals are for the threads of the program
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

DeviceEngine::~DeviceEngine() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void DeviceEngine::add(std::shared_ptr<DeviceGroup> group) {
  std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
}

void DeviceEngine::remove(const std::shared_ptr<DeviceGroup>& group) {
  std::unique_lock lock(mutex_);
  leaving_.push_back(group);
  changed_.notify_all();
  over_.wait(lock, [&] { return std::find(groups_.begin(), groups_.end(), group) == groups_.end(); });
}

void DeviceEngine::refuse(const DeviceGroup& group, const std::string& what) {
  const std::string text = fmt::format("{}: {}", what, group.failed_);
  if (group.timed_out_) throw CommTimeout(text);
  throw CommAborted(text);
}

void DeviceEngine::check_usable(const DeviceGroup& group) {
  std::lock_guard lock(mutex_);
  if (!group.failed_.empty()) refuse(group, "the group is unusable");
}

void DeviceEngine::begin(const std::shared_ptr<DeviceGroup>& group, std::shared_ptr<DeviceOperation> operation) {
  operation->ready.record(exec());
  std::lock_guard lock(mutex_);
  if (!group->failed_.empty()) refuse(*group, fmt::format("{} cannot begin", operation->text));
  asked_.push_back({group, std::move(operation)});
  changed_.notify_all();
}

void DeviceEngine::wait(const std::shared_ptr<DeviceGroup>& group, DeviceOperation& operation) {
  std::unique_lock lock(mutex_);
  if (!operation.queued) {
    operation.awaited = std::max<int64_t>(1, Clock::now().time_since_epoch().count());
    ++waiting_;
    changed_.notify_all();
    over_.wait(lock, [&] { return operation.queued || !group->failed_.empty(); });
    --waiting_;
  }
  if (!operation.queued) refuse(*group, fmt::format("{} ended", operation.text));
  lock.unlock();
  operation.over.hold(exec());
}

bool DeviceEngine::done(const std::shared_ptr<DeviceGroup>& group, const DeviceOperation& operation) {
  std::lock_guard lock(mutex_);
  return operation.queued || !group->failed_.empty();
}

void DeviceEngine::abandon(const std::shared_ptr<DeviceGroup>& group, const DeviceOperation& operation, int rank) {
  std::unique_lock lock(mutex_);
  if (!operation.queued && group->failed_.empty())
    group->failed_ = fmt::format("rank {} failed and left {}", rank, operation.text);
  if (operation.queued) {
    lock.unlock();
    operation.over.wait();
    return;
  }
  changed_.notify_all();
  over_.wait(lock, [&] { return group->dropped_; });
}

void DeviceEngine::fail(DeviceGroup& group, const std::string& why, bool timed_out) {
  std::lock_guard lock(mutex_);
  if (!group.failed_.empty()) return;
  group.failed_ = why;
  group.timed_out_ = timed_out;
  over_.notify_all();
}

void DeviceEngine::run() {
  prctl(PR_SET_TIMERSLACK, 5000UL);  // short naps; the default slack alone is 50 microseconds
  if (options_.device == DeviceKind::cuda) cuda::use_device(device_index_);
  int idle = 0;
  bool busy = false;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto asked = [&] { return !asked_.empty() || !leaving_.empty() || stop_; };
    const auto to_drop = [&] {
      return std::any_of(groups_.begin(), groups_.end(),
                         [](const auto& group) { return !group->failed_.empty() && !group->dropped_; });
    };
    if (!busy)
      changed_.wait(lock, [&] { return asked() || to_drop(); });
    else if (idle > kLooksBeforeNaps && asked_.empty() &&
             !stop_)  // a group that leaves may have to wait for the device
      changed_.wait_for(lock, std::chrono::microseconds(waiting_ > 0 ? 20 : 50));
    if (stop_) return;  // whoever has a group keeps the engine: there are none left
    std::vector<Asked> asked_now;
    asked_now.swap(asked_);
    lock.unlock();
    const bool moved = work_round(std::move(asked_now));
    if (moved)
      idle = 0;
    else if (++idle <= kLooksBeforeNaps)
      sched_yield();
    lock.lock();
    busy = std::any_of(groups_.begin(), groups_.end(),
                       [](const auto& group) { return !group->dropped_ && !group->idle(); });
  }
}

bool DeviceEngine::work_round(std::vector<Asked> asked) {
  std::unique_lock lock(mutex_);
  const std::vector<std::shared_ptr<DeviceGroup>> leaving = std::move(leaving_);
  leaving_.clear();
  const std::vector<std::shared_ptr<DeviceGroup>> groups = groups_;
  std::vector<std::shared_ptr<DeviceGroup>> failed;
  for (const auto& group : groups)
    if (!group->failed_.empty()) failed.push_back(group);
  lock.unlock();

  bool moved = !asked.empty();
  const DeviceGroup::Queued queued = [this](DeviceOperation& operation) {
    std::lock_guard guard(mutex_);
    operation.queued = true;
    over_.notify_all();
  };
  const auto drop = [&](DeviceGroup& group) {
    if (group.dropped_) return;
    try {
      group.drop();
    } catch (const std::exception&) {  // it failed before, and that is what is told
    }
    std::lock_guard guard(mutex_);
    group.dropped_ = true;
    over_.notify_all();
  };
  for (const auto& group : failed) drop(*group);
  for (const auto& group : groups) {
    if (group->dropped_) continue;
    try {
      for (const Asked& one : asked)
        if (one.group == group) group->begin(one.operation);
      moved = group->advance(queued) || moved;
    } catch (const CommTimeout& timeout) {
      drop(*group);  // first: who hears of the failure may let memory go
      fail(*group, timeout.what(), true);
    } catch (const std::exception& error) {
      drop(*group);
      fail(*group, error.what(), false);
    }
  }
  for (const auto& group : leaving) {
    const bool still = !group->dropped_ && !group->idle();  // what the device works on ends, or its time does
    std::lock_guard guard(mutex_);
    if (still) {
      leaving_.push_back(group);
      continue;
    }
    if (group->failed_.empty()) group->failed_ = "the group is gone";
    group->dropped_ = true;
    std::erase(groups_, group);
    over_.notify_all();
  }
  return moved;
}

}  // namespace sb
