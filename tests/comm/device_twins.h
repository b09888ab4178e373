#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "device/cuda.h"

namespace sb {

// Gives the cases, which know host memory, a communicator of device memory: every buffer has a twin there.
class Twins final : public Communicator {
 public:
  Twins(std::unique_ptr<Communicator> device, void* stream) : device_(std::move(device)), stream_(stream) {}

  int rank() const override { return device_->rank(); }
  int size() const override { return device_->size(); }
  const std::string& name() const override { return device_->name(); }
  std::chrono::milliseconds timeout() const override { return device_->timeout(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    auto part = device_->split(color, key, name);
    return part ? std::make_unique<Twins>(std::move(part), stream_) : nullptr;
  }
  CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return run(data, count * bytes_of(type),
               [&](void* twin) { return device_->all_reduce_async(twin, count, type, op); });
  }
  CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return run(data, size() * count * bytes_of(type),
               [&](void* twin) { return device_->reduce_scatter_async(twin, count, type, op); });
  }
  CommRequest all_gather_async(void* data, int64_t count, CommType type) override {
    return run(data, size() * count * bytes_of(type),
               [&](void* twin) { return device_->all_gather_async(twin, count, type); });
  }
  CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) override {
    return run(data, count * bytes_of(type),
               [&](void* twin) { return device_->broadcast_async(twin, count, type, root); });
  }
  CommRequest send_async(const void* data, int64_t bytes, int to, int tag) override {
    return run(const_cast<void*>(data), bytes, [&](void* twin) { return device_->send_async(twin, bytes, to, tag); });
  }
  CommRequest receive_async(void* data, int64_t bytes, int from, int tag) override {
    return run(data, bytes, [&](void* twin) { return device_->receive_async(twin, bytes, from, tag); });
  }
  CommRequest barrier_async() override { return device_->barrier_async(); }
  void check_usable() const override { device_->check_usable(); }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    device_->abort(why, exit_code);
    throw CommAborted(why);
  }

 private:
  static int64_t bytes_of(CommType type) {
    if (type == CommType::bf16) return 2;
    return type == CommType::u8 ? 1 : type == CommType::i32 || type == CommType::f32 ? 4 : 8;
  }

  class Request final : public CommRequest::State {
   public:
    Request(CommRequest request, void* data, std::shared_ptr<void> twin, int64_t bytes, void* stream)
        : request_(std::move(request)), data_(data), twin_(std::move(twin)), bytes_(bytes), stream_(stream) {}
    ~Request() override { wait(); }
    void wait() override {
      request_.wait();
      if (bytes_ > 0) cuda::copy(stream_, twin_.get(), data_, bytes_);
      cuda::synchronize(stream_);
      bytes_ = 0;
    }
    bool done() override { return request_.done(); }
    void abandon() override { request_.abandon(); }

   private:
    CommRequest request_;
    void* data_;
    std::shared_ptr<void> twin_;
    int64_t bytes_;
    void* stream_;
  };

  CommRequest run(void* data, int64_t bytes, const std::function<CommRequest(void*)>& begin) {
    std::shared_ptr<void> twin = bytes > 0 ? cuda::allocate("test", bytes) : nullptr;
    if (bytes > 0) cuda::copy(stream_, data, twin.get(), bytes);
    CommRequest request = begin(twin.get());
    return CommRequest(std::make_unique<Request>(std::move(request), data, twin, bytes, stream_));
  }

  std::unique_ptr<Communicator> device_;
  void* stream_;
};

}  // namespace sb
