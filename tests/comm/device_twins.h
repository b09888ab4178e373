#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "core/errors.h"
#include "device/cuda.h"

namespace sb {

// Device memory for twins, taken once. cudaFree waits for all kernels of the device, and a kernel of NCCL waits for the
// other rank: two ranks that give memory back between messages may wait for each other for ever.
class TwinMemory {
 public:
  explicit TwinMemory(void* stream) : memory_(cuda::allocate("twins", kBytes)), stream_(stream) {}

  // Valid for as long as somebody holds it.
  std::shared_ptr<void> take(int64_t bytes) {
    if (held_ == 0) used_ = 0;
    const int64_t begin = used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    SB_CHECK(used_ <= kBytes, "twins of more than {} bytes", kBytes);
    ++held_;
    return {static_cast<char*>(memory_.get()) + begin, [this](void*) { --held_; }};
  }
  void* stream() const { return stream_; }

 private:
  static constexpr int64_t kBytes = 32 << 20, kAlignment = 256;
  std::shared_ptr<void> memory_;
  void* stream_;
  int64_t used_ = 0, held_ = 0;
};

// Gives the cases, which know host memory, a communicator of device memory: every buffer has a twin there.
class Twins final : public Communicator {
 public:
  Twins(std::unique_ptr<Communicator> device, void* stream)
      : Twins(std::move(device), std::make_shared<TwinMemory>(stream)) {}
  Twins(std::unique_ptr<Communicator> device, std::shared_ptr<TwinMemory> memory)
      : device_(std::move(device)), memory_(std::move(memory)) {}

  int rank() const override { return device_->rank(); }
  int size() const override { return device_->size(); }
  const std::string& name() const override { return device_->name(); }
  std::chrono::milliseconds timeout() const override { return device_->timeout(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    auto part = device_->split(color, key, name);
    return part ? std::make_unique<Twins>(std::move(part), memory_) : nullptr;
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
    std::shared_ptr<void> twin = bytes > 0 ? memory_->take(bytes) : nullptr;
    if (bytes > 0) cuda::copy(memory_->stream(), data, twin.get(), bytes);
    CommRequest request = begin(twin.get());
    return CommRequest(std::make_unique<Request>(std::move(request), data, twin, bytes, memory_->stream()));
  }

  std::unique_ptr<Communicator> device_;
  std::shared_ptr<TwinMemory> memory_;
};

}  // namespace sb
