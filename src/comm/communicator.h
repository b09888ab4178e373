#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/errors.h"

namespace sb {

// A wait for other ranks took longer than allowed; the message says who waited for what: "rank 3 waited 60 s for
// all_reduce #812 of group dp".
class CommTimeout : public Error {
 public:
  using Error::Error;
};

// Another rank ended the job, or failed while this one waited for it.
class CommAborted : public Error {
 public:
  using Error::Error;
};

enum class CommType { u8, i32, i64, f32, f64, bf16 };
enum class ReduceOp { sum, max, min };

template <typename T>
constexpr CommType comm_type() {
  if constexpr (std::is_same_v<T, float>)
    return CommType::f32;
  else if constexpr (std::is_same_v<T, double>)
    return CommType::f64;
  else if constexpr (std::is_same_v<T, int32_t>)
    return CommType::i32;
  else if constexpr (std::is_same_v<T, int64_t>)
    return CommType::i64;
  else {
    static_assert(sizeof(T) == 1, "no such communication type");
    return CommType::u8;
  }
}

// An operation under way. Its buffers stay untouched until wait() returned; a request dropped without wait() is waited
// for. An empty request is done.
class CommRequest {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;  // CommTimeout, or what the operation failed with
    virtual bool done() = 0;  // also moves the operation on, where nothing else does
    virtual void abandon() = 0;
  };
  CommRequest() = default;
  explicit CommRequest(std::unique_ptr<State> state) : state_(std::move(state)) {}
  CommRequest(CommRequest&&) = default;
  CommRequest& operator=(CommRequest&& other) noexcept {
    if (this != &other) {
      leave();
      state_ = std::move(other.state_);
    }
    return *this;
  }
  ~CommRequest() { leave(); }
  void wait() {
    if (const std::unique_ptr<State> state = std::move(state_)) state->wait();
  }
  bool done() { return !state_ || state_->done(); }
  // The operation's memory is about to go, whether it is over or not: nobody touches it afterwards, and unless it was
  // over the group is unusable from then on.
  void abandon() {
    if (const std::unique_ptr<State> state = std::move(state_)) state->abandon();
  }

 private:
  // Where an exception is on its way the memory goes with it, and nobody waits for anything.
  void leave() noexcept {
    try {
      if (std::uncaught_exceptions() > 0)
        abandon();
      else
        wait();
    } catch (const Error&) {  // whoever cares about the outcome waits
    }
  }

  std::unique_ptr<State> state_;
};

// A group of ranks as one of them sees it. All ranks of a group call the same collectives in the same order with equal
// counts. Every result is the same on all ranks bit by bit, and the same for every run: reductions add in rank order
// wherever the implementation lets us choose (the documentation of each says). Buffers are host memory; those of the
// communicators in device_communicator.h are device memory, and operations stand in the order of a stream.
//
// Every wait ends: after timeout() it throws CommTimeout and the group is unusable from then on.
//
// One thread at a time uses a group; threads of a rank that communicate independently use a group each.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;  // of the group, for messages: "world", "dp", …
  virtual std::chrono::milliseconds timeout() const = 0;

  // A group of those that gave the same color, ranks ordered by (key, old rank). Collective. A negative color: this
  // rank is in none and gets nothing.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  // `data` of all ranks combined, in place.
  virtual CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) = 0;
  // `data` holds size() pieces of `count` elements each; afterwards the own piece (number rank()) holds the reduction
  // and the others are undefined.
  virtual CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) = 0;
  // `data` holds size() pieces of `count` elements each, the own one filled; afterwards all are.
  virtual CommRequest all_gather_async(void* data, int64_t count, CommType type) = 0;
  virtual CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) = 0;
  // Messages between two ranks arrive in the order they were sent; the receiver gives the exact size. Several may be
  // under way at once.
  virtual CommRequest send_async(const void* data, int64_t bytes, int to, int tag) = 0;
  virtual CommRequest receive_async(void* data, int64_t bytes, int from, int tag) = 0;
  virtual CommRequest barrier_async() = 0;

  // Throws where the next operation would: the group is unusable, or a rank of this process ended the job. For whoever
  // waits for something that is not an operation of this group.
  virtual void check_usable() const = 0;

  // Of a world whose ranks are processes: where each of them is ("host-b, GPU 3"), for messages, and how long a wait
  // may take from now on, in all of its groups. Others take no notice.
  virtual void place_ranks(std::vector<std::string>) {}
  virtual void set_timeout(std::chrono::milliseconds) {}

  // Ends the job for all ranks, from any of them: a rank that failed must not leave the others waiting. Ranks of the
  // same process get an exception from their next wait; other processes are stopped by the launcher.
  // `exit_code` is what the launcher gives, where it passes one on.
  [[noreturn]] virtual void abort(const std::string& why, int exit_code = 1) = 0;

  // The same, waited for.
  template <typename T>
  void all_reduce(std::span<T> data, ReduceOp op = ReduceOp::sum) {
    all_reduce_async(data.data(), static_cast<int64_t>(data.size()), comm_type<T>(), op).wait();
  }
  template <typename T>
  T all_reduce(T value, ReduceOp op = ReduceOp::sum) {
    all_reduce(std::span<T>(&value, 1), op);
    return value;
  }
  template <typename T>
  void broadcast(std::span<T> data, int root) {
    broadcast_async(data.data(), static_cast<int64_t>(data.size()), comm_type<T>(), root).wait();
  }
  template <typename T>
  void all_gather(std::span<T> data, int64_t count) {
    all_gather_async(data.data(), count, comm_type<T>()).wait();
  }
  template <typename T>
  void reduce_scatter(std::span<T> data, int64_t count, ReduceOp op = ReduceOp::sum) {
    reduce_scatter_async(data.data(), count, comm_type<T>(), op).wait();
  }
  void barrier() { barrier_async().wait(); }
};

}  // namespace sb
