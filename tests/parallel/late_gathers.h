#pragma once

// Gathers that are as late as they may be: what comes from other ranks is garbage until somebody waits for it.

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/reduce.h"

namespace sb {

class LateGathers final : public Communicator {
 public:
  // `at_once`: every gather is waited for before it is returned.
  LateGathers(Communicator& inner, bool at_once) : inner_(&inner), at_once_(at_once) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    std::unique_ptr<Communicator> part = inner_->split(color, key, name);
    if (!part) return nullptr;
    auto late = std::make_unique<LateGathers>(*part, at_once_);
    late->owned_ = std::move(part);
    return late;
  }
  CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return inner_->all_reduce_async(data, count, type, op);
  }
  CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return inner_->reduce_scatter_async(data, count, type, op);
  }
  CommRequest all_gather_async(void* data, int64_t count, CommType type) override {
    auto gather = std::make_unique<Gather>(static_cast<char*>(data), count * comm_type_bytes(type), *inner_);
    if (at_once_) {
      gather->wait();
      return {};
    }
    return CommRequest(std::move(gather));
  }
  CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) override {
    return inner_->broadcast_async(data, count, type, root);
  }
  CommRequest send_async(const void* data, int64_t bytes, int to, int tag) override {
    return inner_->send_async(data, bytes, to, tag);
  }
  CommRequest receive_async(void* data, int64_t bytes, int from, int tag) override {
    return inner_->receive_async(data, bytes, from, tag);
  }
  CommRequest barrier_async() override { return inner_->barrier_async(); }
  void check_usable() const override { inner_->check_usable(); }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    inner_->abort(why, exit_code);
    throw CommAborted(why);  // never reached; the compiler does not see it through the pointer
  }

 private:
  // Runs in memory of its own.
  class Gather final : public CommRequest::State {
   public:
    Gather(char* data, int64_t piece, Communicator& inner)
        : data_(data), piece_(static_cast<size_t>(piece)), rank_(static_cast<size_t>(inner.rank())) {
      const size_t bytes = piece_ * static_cast<size_t>(inner.size());
      arriving_.assign(data, data + bytes);
      std::memset(data_, 0xff, rank_ * piece_);
      std::memset(data_ + (rank_ + 1) * piece_, 0xff, bytes - (rank_ + 1) * piece_);
      request_ = inner.all_gather_async(arriving_.data(), piece, CommType::u8);
    }
    void wait() override {
      request_.wait();
      const size_t own_end = (rank_ + 1) * piece_;
      std::memcpy(data_, arriving_.data(), rank_ * piece_);
      std::memcpy(data_ + own_end, arriving_.data() + own_end, arriving_.size() - own_end);
    }
    bool done() override { return request_.done(); }
    void abandon() override { request_.abandon(); }

   private:
    char* data_;
    size_t piece_, rank_;
    std::vector<char> arriving_;
    CommRequest request_;
  };

  Communicator* inner_;
  std::unique_ptr<Communicator> owned_;
  bool at_once_;
};

}  // namespace sb
