#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/message_steps.h"
#include "comm/peer_watch.h"
#include "comm/transport.h"
#include "comm/world.h"

namespace sb {

// The members of a group of processes, as ranks of the transport, and the bits of the tag that keep it apart.
struct MessageGroup {
  std::string name;
  std::vector<int> world_rank;
  int rank = 0;  // of this process
  int context = 0;
};

// One operation under way.
struct MessageOperation {
  std::shared_ptr<const MessageGroup> group;
  std::string text;  // "all_reduce #812 of group dp"
  int tag = 0;
  std::unique_ptr<MessageSteps> steps;

  struct Pending {
    int peer;  // in the group
    bool receive;
    int64_t bytes;
  };
  // Guarded by the engine's lock from begin() on.
  std::map<int64_t, Pending> pending;  // by ticket
  bool done = false;
  std::string error;
  bool lost = false;  // `error` is what the transport says: the other rank or the way to it is gone
};

// Moves the operations of all groups of this process on, on a thread of its own that alone talks to the transport, so
// that transfers and reductions go on while the model computes. It sleeps when there is nothing to do, and between
// looks otherwise: a rank may have one core only.
//
// After a time-out, or when a rank leaves with operations under way, nothing is moved any more (data might arrive in
// memory that is gone): all groups are unusable and the process should end, best by abort().
class MessageEngine {
 public:
  // `timeout`: of every wait, and of opening the transport, on which the process ends (MPI itself cannot be called
  // off).
  MessageEngine(const std::function<std::unique_ptr<Transport>()>& open, std::chrono::milliseconds timeout);
  ~MessageEngine();

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // "rank 3", or where that is known "rank 3 on host-b"; of the world.
  std::string name(int rank);
  void set_places(std::vector<std::string> places);
  // From now on the end of another rank ends this one, too. `options.lost`: called where this rank is the one that says
  // so. Collective; `world`: a group of all, on this engine.
  void watch_peers(Communicator& world, const WorldOptions& options);

  // Throws where begin() would.
  void check_usable(const MessageGroup& group);
  void begin(const std::shared_ptr<MessageOperation>& operation);
  void wait(MessageOperation& operation);
  bool done(const MessageOperation& operation);
  // The operation's memory is about to go while it is under way.
  void abandon(const MessageOperation& operation);
  [[noreturn]] void abort(const std::string& message, int exit_code);
  // How long the thread sleeps, or slept last, between two looks.
  std::chrono::microseconds nap();

  // Contexts are handed out by agreement: each member proposes its next free one, all take the largest.
  int next_context();
  void use_context(int context);

 private:
  class Poster;
  void run(const std::function<std::unique_ptr<Transport>()>& open);
  void work(Transport& transport);
  void advance(Transport& transport, const std::shared_ptr<MessageOperation>& operation);
  void finish(MessageOperation& operation, const std::string& error);
  void fail(const std::string& why);
  void refuse_if_failed(const MessageGroup& group) const;
  bool move_on(Transport& transport);
  std::string name_locked(int rank) const;
  std::string place(int rank);
  void end_job(const PeerWatch::End& end);
  void tell_of(LostRank lost, std::chrono::seconds limit);
  [[noreturn]] static void leave(int exit_code);

  std::atomic<std::chrono::milliseconds> timeout_;
  int rank_ = 0, size_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;  // for the thread: something was asked
  std::condition_variable over_;     // for those who wait
  std::vector<std::shared_ptr<MessageOperation>> asked_;
  int waiting_ = 0;
  bool polled_ = false;  // somebody asked whether an operation is over, since the thread's last nap
  std::chrono::microseconds nap_{0};
  int next_context_ = 1;
  bool opened_ = false, stop_ = false, abort_ = false, timed_out_ = false;
  int exit_code_ = 1;    // with abort_
  bool ending_ = false;  // the watch ends this process
  std::string failed_;   // why nothing moves any more
  bool moving_ = false;  // the thread is at the data of operations right now

  // The thread's own.
  std::unordered_map<int64_t, std::shared_ptr<MessageOperation>> by_ticket_;
  int sending_ = 0;  // of these
  std::vector<Transport::Finished> finished_;

  std::vector<std::string> places_;  // of the ranks; empty: not known
  std::function<void(const LostRank&)> told_;
  std::thread thread_;
  std::unique_ptr<PeerWatch> watch_;
};

}  // namespace sb
