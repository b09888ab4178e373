#include "comm/message_engine.h"

#include <fmt/format.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <future>
#include <set>
#include <utility>

#include "comm/host_name.h"

namespace sb {

using std::chrono::microseconds;
// Looks in a row that find nothing before the thread takes a nap: about a millisecond where somebody waits.
constexpr int kPatience = 1000, kLooks = 2;
constexpr microseconds kShortestNap(10), kNapIfExpected(160), kLongestNap(1280);

// While somebody waits the core is free but for other ranks on it. Otherwise the model computes on it, and every look
// costs it some microseconds: they become rare while nothing happens, less so while something is to be sent, because
// the other side may wait for the next part, or while somebody asks whether it is over, because a device may.
microseconds nap_after(int idle, bool somebody_waits, bool somebody_may_wait) {
  if (somebody_waits) return microseconds(20);
  const microseconds nap = kShortestNap * (1 << std::clamp(idle - kLooks, 0, 7));
  return std::min(nap, somebody_may_wait ? kNapIfExpected : kLongestNap);
}

// A thread that sleeps most of the time would wait for the rest of a computing thread's time slice, milliseconds, when
// it wakes up on that one's core. Linux lets one that asks for short slices go first (from 6.12 on; it takes no notice
// before).
void ask_for_short_slices() {
  if (sched_getscheduler(0) != SCHED_OTHER) return;  // somebody has chosen
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{sizeof(attributes), SCHED_OTHER, 0, getpriority(PRIO_PROCESS, 0), 0, 100'000, 0, 0};
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// Collects what a round posts.
class MessageEngine::Poster final : public MessagePoster {
 public:
  Poster(Transport& transport, const MessageOperation& operation) : transport_(transport), operation_(operation) {}

  void send(const void* data, int64_t bytes, int to) override {
    for_parts(bytes, [&](int64_t begin, int64_t count) {
      const int64_t ticket =
          transport_.send(static_cast<const char*>(data) + begin, count, world_rank(to), operation_.tag);
      posted.emplace_back(ticket, MessageOperation::Pending{to, false, count});
    });
  }
  void receive(void* data, int64_t bytes, int from) override {
    for_parts(bytes, [&](int64_t begin, int64_t count) {
      const int64_t ticket =
          transport_.receive(static_cast<char*>(data) + begin, count, world_rank(from), operation_.tag);
      posted.emplace_back(ticket, MessageOperation::Pending{from, true, count});
    });
  }

  std::vector<std::pair<int64_t, MessageOperation::Pending>> posted;

 private:
  int world_rank(int r) const { return operation_.group->world_rank[r]; }

  // An empty message is one, too.
  template <typename Post>
  static void for_parts(int64_t bytes, const Post& post) {
    int64_t begin = 0;
    do {
      const int64_t count = std::min(bytes - begin, Transport::kLargestMessage);
      post(begin, count);
      begin += count;
    } while (begin < bytes);
  }

  Transport& transport_;
  const MessageOperation& operation_;
};

MessageEngine::MessageEngine(const std::function<std::unique_ptr<Transport>()>& open, std::chrono::milliseconds timeout)
    : timeout_(timeout) {
  // Signals are for the threads of the program; those the library starts inherit this, too.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, open] { run(open); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::unique_lock lock(mutex_);
  const bool in_time = over_.wait_for(lock, timeout, [&] { return opened_ || !failed_.empty(); });
  if (!in_time) {
    // A thread inside MPI's start cannot be stopped.
    std::fprintf(stderr,
                 "%s: the ranks did not find each other within %g s (parallel.start_timeout): one of them did not "
                 "start, or the network keeps them apart\n",
                 host_name().c_str(), std::chrono::duration<double>(timeout).count());
    _exit(1);
  }
  if (opened_) return;
  lock.unlock();
  thread_.join();
  throw UserError("{}", failed_);
}

MessageEngine::~MessageEngine() {
  if (watch_ && std::uncaught_exceptions() > 0) watch_->announce(name(rank_) + " failed", 1);
  {
    std::lock_guard lock(mutex_);
    // On the way out with an error this rank must not wait for the others: the launcher ends them when it is gone.
    if (std::uncaught_exceptions() > 0 && failed_.empty()) failed_ = "the rank failed";
    stop_ = true;
    changed_.notify_all();
    over_.notify_all();
  }
  watch_.reset();  // before the farewell of MPI, for which all wait
  thread_.join();
}

std::string MessageEngine::name(int rank) {
  std::lock_guard lock(mutex_);
  return name_locked(rank);
}

std::string MessageEngine::name_locked(int rank) const {
  if (places_.empty()) return fmt::format("rank {}", rank);
  return fmt::format("rank {} on {}", rank, places_[static_cast<size_t>(rank)]);
}

std::string MessageEngine::place(int rank) {
  std::lock_guard lock(mutex_);
  return places_.empty() ? "" : places_[static_cast<size_t>(rank)];
}

void MessageEngine::set_places(std::vector<std::string> places) {
  SB_CHECK(std::ssize(places) == size_, "{} places of {} ranks", places.size(), size_);
  std::lock_guard lock(mutex_);
  places_ = std::move(places);
}

void MessageEngine::watch_peers(Communicator& world, const WorldOptions& options) {
  told_ = options.lost;
  watch_ = std::make_unique<PeerWatch>(
      world, [this](int rank) { return name(rank); }, options.stopping,
      [this](const PeerWatch::End& end) { end_job(end); });
}

// Before this rank ends. On a thread that may be left behind: it may write to a file system that hangs for the same
// reason, which must not keep this rank for longer than `limit`.
void MessageEngine::tell_of(LostRank lost, std::chrono::seconds limit) {
  std::promise<void> told;
  const std::future<void> over = told.get_future();
  std::thread([tell = told_, lost = std::move(lost), told = std::move(told)]() mutable {
    tell(lost);
    told.set_value();
  }).detach();
  over.wait_for(limit);
}

// On the watch's thread. The launcher ends the ranks by itself, as a rule, and knows by which signal one was lost.
void MessageEngine::end_job(const PeerWatch::End& end) {
  constexpr std::chrono::seconds kTimeForTheLauncher(3), kTimeToTell(1);
  if (end.lost_rank >= 0) {
    std::fprintf(stderr, "%s\n", end.text.c_str());
    if (told_) tell_of({end.lost_rank, place(end.lost_rank), end.text}, kTimeToTell);
  }
  {
    std::unique_lock lock(mutex_);
    if (abort_) return;
    ending_ = true;
    exit_code_ = end.exit_code;
    fail(end.text);
    changed_.notify_all();
    if (over_.wait_for(lock, end.at_once ? kTimeToTell : kTimeForTheLauncher, [&] { return stop_; })) return;
    abort_ = true;
    changed_.notify_all();
  }
  leave(end.exit_code);
}

// The library ends this process, too; should it be stuck, an exit without a farewell makes the launcher end the rest.
void MessageEngine::leave(int exit_code) {
  std::this_thread::sleep_for(std::chrono::seconds(3));
  _exit(exit_code);
}

void MessageEngine::refuse_if_failed(const MessageGroup& group) const {
  if (failed_.empty()) return;
  const std::string text = fmt::format("group {} is unusable: {}", group.name, failed_);
  if (timed_out_) throw CommTimeout(text);
  throw CommAborted(text);
}

void MessageEngine::check_usable(const MessageGroup& group) {
  std::lock_guard lock(mutex_);
  refuse_if_failed(group);
}

void MessageEngine::begin(const std::shared_ptr<MessageOperation>& operation) {
  std::lock_guard lock(mutex_);
  refuse_if_failed(*operation->group);
  asked_.push_back(operation);
  changed_.notify_all();
}

void MessageEngine::wait(MessageOperation& operation) {
  std::unique_lock lock(mutex_);
  if (!operation.done) {
    ++waiting_;
    changed_.notify_all();
    const bool in_time = over_.wait_for(lock, timeout(), [&] { return operation.done || !failed_.empty(); });
    --waiting_;
    if (!in_time) {
      std::string text = fmt::format("{} waited {:g} s for {}", name_locked(rank_),
                                     std::chrono::duration<double>(timeout()).count(), operation.text);
      for (const bool receive : {true, false}) {
        std::set<int> peers;
        for (const auto& [ticket, pending] : operation.pending)
          if (pending.receive == receive) peers.insert(operation.group->world_rank[pending.peer]);
        std::vector<std::string> names;
        for (const int peer : peers) names.push_back(name_locked(peer));
        if (!names.empty())
          text += fmt::format("; {} {}", receive ? "nothing came from" : "not taken by", fmt::join(names, ", "));
      }
      timed_out_ = true;
      fail(text);
      over_.wait(lock, [&] { return !moving_; });
      throw CommTimeout(text);
    }
  }
  if (operation.lost) throw CommAborted(operation.error);
  if (!operation.error.empty()) throw InternalError("{}", operation.error);
  if (operation.done) return;
  over_.wait(lock, [&] { return !moving_; });
  const std::string text = fmt::format("{} ended: {}", operation.text, failed_);
  if (timed_out_) throw CommTimeout(text);
  throw CommAborted(text);
}

bool MessageEngine::done(const MessageOperation& operation) {
  std::lock_guard lock(mutex_);
  const bool over = operation.done || !failed_.empty();
  if (!over) polled_ = true;
  return over;
}

microseconds MessageEngine::nap() {
  std::lock_guard lock(mutex_);
  return nap_;
}

void MessageEngine::abandon(const MessageOperation& operation) {
  std::unique_lock lock(mutex_);
  if (operation.done) return;
  fail(fmt::format("{} failed and left {}", name_locked(rank_), operation.text));
  over_.wait(lock, [&] { return !moving_; });
}

void MessageEngine::abort(const std::string& message, int exit_code) {
  const auto said_already = [&] {
    std::lock_guard lock(mutex_);
    return ending_;
  };
  while (said_already()) std::this_thread::sleep_for(std::chrono::seconds(1));  // the watch ends this process
  std::fprintf(stderr, "%s\n", message.c_str());
  if (watch_) watch_->announce(message, exit_code);
  {
    std::lock_guard lock(mutex_);
    abort_ = true;
    exit_code_ = exit_code;
    fail(message);
    changed_.notify_all();
  }
  leave(exit_code);
}

int MessageEngine::next_context() {
  std::lock_guard lock(mutex_);
  return next_context_;
}

void MessageEngine::use_context(int context) {
  std::lock_guard lock(mutex_);
  next_context_ = std::max(next_context_, context + 1);
}

void MessageEngine::fail(const std::string& why) {
  if (failed_.empty()) failed_ = why;
  over_.notify_all();
}

void MessageEngine::run(const std::function<std::unique_ptr<Transport>()>& open) {
  prctl(PR_SET_TIMERSLACK, 5000UL);  // short naps; the default slack alone is 50 microseconds
  ask_for_short_slices();
  std::unique_ptr<Transport> transport;
  try {
    transport = open();
    std::lock_guard lock(mutex_);
    rank_ = transport->rank();
    size_ = transport->size();
    opened_ = true;
    over_.notify_all();
  } catch (const std::exception& failure) {
    std::lock_guard lock(mutex_);
    return fail(failure.what());
  }
  try {
    work(*transport);
  } catch (const std::exception& failure) {
    std::unique_lock lock(mutex_);
    moving_ = false;
    fail(fmt::format("{}: {}", name_locked(rank_), failure.what()));
    changed_.wait(lock, [&] { return stop_ || abort_; });
  }
  std::unique_lock lock(mutex_);
  const bool leave = abort_, healthy = failed_.empty();
  const int exit_code = exit_code_;
  lock.unlock();
  if (leave) transport->abort(exit_code);
  if (healthy) transport->close();
}

void MessageEngine::work(Transport& transport) {
  int idle = 0;  // looks in a row that found nothing
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto asked = [&] { return !asked_.empty() || stop_ || abort_; };
    if (!failed_.empty())
      changed_.wait(lock, [&] { return stop_ || abort_; });
    else if (by_ticket_.empty())
      changed_.wait(lock, asked);
    else if (idle > (waiting_ > 0 ? kPatience : kLooks) && asked_.empty())
      changed_.wait_for(lock, nap_ = nap_after(idle, waiting_ > 0, std::exchange(polled_, false) || sending_ > 0));
    if (abort_ || (stop_ && (!failed_.empty() || (asked_.empty() && by_ticket_.empty())))) return;
    if (!failed_.empty()) continue;
    std::vector<std::shared_ptr<MessageOperation>> asked_now;
    asked_now.swap(asked_);
    moving_ = true;
    lock.unlock();
    for (const std::shared_ptr<MessageOperation>& operation : asked_now) advance(transport, operation);
    const bool moved = move_on(transport);
    if (moved || !asked_now.empty())
      idle = 0;
    else if (++idle <= kPatience)
      sched_yield();
    lock.lock();
    moving_ = false;
    if (!failed_.empty()) over_.notify_all();
  }
}

// Posts rounds until one has messages to wait for.
void MessageEngine::advance(Transport& transport, const std::shared_ptr<MessageOperation>& operation) {
  for (;;) {
    Poster poster(transport, *operation);
    const bool more = operation->steps->next(poster);
    std::lock_guard lock(mutex_);
    for (const auto& [ticket, pending] : poster.posted) {
      operation->pending.emplace(ticket, pending);
      by_ticket_.emplace(ticket, operation);
      sending_ += pending.receive ? 0 : 1;
    }
    if (!poster.posted.empty()) return;
    if (!more) return finish(*operation, "");
  }
}

void MessageEngine::finish(MessageOperation& operation, const std::string& error) {
  operation.done = true;
  operation.error = error;
  if (!error.empty()) fail(error);
  over_.notify_all();
}

bool MessageEngine::move_on(Transport& transport) {
  finished_.clear();
  transport.poll(finished_);
  for (const Transport::Finished& message : finished_) {
    const auto found = by_ticket_.find(message.ticket);
    const std::shared_ptr<MessageOperation> operation = found->second;
    by_ticket_.erase(found);
    {
      std::lock_guard lock(mutex_);
      const MessageOperation::Pending pending = operation->pending.at(message.ticket);
      operation->pending.erase(message.ticket);
      sending_ -= pending.receive ? 0 : 1;
      if (operation->done) continue;
      operation->lost = !message.error.empty();
      if (!message.error.empty() || (pending.receive && message.bytes != pending.bytes))
        finish(*operation,
               fmt::format("{}: {}: {} {}: {}", name_locked(rank_), operation->text, pending.receive ? "from" : "to",
                           name_locked(operation->group->world_rank[pending.peer]),
                           message.error.empty()
                               ? fmt::format("{} bytes came, {} were expected", message.bytes, pending.bytes)
                               : message.error));
      if (!operation->pending.empty() || operation->done) continue;
    }
    advance(transport, operation);
  }
  return !finished_.empty();
}

}  // namespace sb
