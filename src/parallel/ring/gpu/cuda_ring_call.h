#pragma once

// One forward or backward of a ring of GPUs, when its lists are there.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "comm/communicator.h"
#include "device/cuda.h"
#include "parallel/ring/gpu/cuda_ring_plan.h"
#include "parallel/ring/ring_travel.h"

namespace sb {

// Numbers of rows on the device. They change in the order of the stream: what is queued keeps those it was queued with.
class DeviceRows {
 public:
  void assign(const Exec& exec, const std::vector<int32_t>& rows) {
    const auto bytes = static_cast<int64_t>(rows.size() * sizeof(int32_t));
    if (bytes > bytes_) memory_ = cuda::allocate("ring rows", bytes_ = bytes + bytes / 4);
    count_ = std::ssize(rows);
    // From pageable memory: what it reads is taken when it returns.
    if (bytes > 0) cuda::copy(exec.stream, rows.data(), memory_.get(), bytes);
  }
  const int32_t* data() const { return static_cast<const int32_t*>(memory_.get()); }
  int64_t count() const { return count_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0, count_ = 0;
};

// A call of the kernels, ready for the device: a token of its made-up sequences is a row of keys, of queries, of both
// (own keys) or of nothing (padding).
struct DevicePass {
  // Of a piece: where its queries begin behind the keys. They and the keys are then read where they lie, but for keys
  // whose rows are named.
  std::optional<int32_t> first_query;
  std::array<KeyPage, 2> pages;
  DeviceRows keys, queries;
  std::vector<int32_t> cu_seqlens;
  std::unique_ptr<AttentionState> lists;
  int64_t tokens() const { return cu_seqlens.back(); }
};

class CudaRingState final : public AttentionState {
 public:
  // Lists that were made on the device.
  std::shared_ptr<gpu::CudaRingPlan> plan;
  gpu::DeviceBuffer lists;
  // Lists that came from the host; used when there is no plan.
  std::optional<ContextLayout> layout;
  BlockIndex index;
  bool given_lists = false;            // the index was not selected here
  bool built = false;                  // what follows, from the index
  std::optional<int64_t> first_query;  // of a piece, in its sequence
  DeviceRows given;
  int64_t piece = 0;
  std::vector<std::vector<DevicePass>> passes;  // [ranks + 1]: of every chunk, then of the copies

  const ContextLayout& shared() const { return plan ? plan->layout() : *layout; }
  gpu::CudaRingPlan::Lists lists_of(const gpu::CudaRingPlan::Set& set) const {
    return set.dense ? plan->own_lists(set) : plan->lists_in(set, lists.data());
  }
};

// A call of the kernels, with lists of either kind.
struct PassRun {
  const int32_t *keys, *queries;
  int64_t tokens;
  const DevicePass* given = nullptr;  // lists from the host
  const gpu::CudaRingPlan::Set* set = nullptr;
  int number = 0;  // of the set's passes
};

// What forward and backward of one call have in common.
class CudaRingCall {
 public:
  struct Ring {
    Communicator& data;
    RingTravel& travel;
    SelectingAttention& kernels;  // for lists from the host
    bool deterministic = false;
  };
  CudaRingCall(const Ring& ring, const Exec& exec, int layer, const AttentionShape& shape,
               const AttentionOperands& operands, const CudaRingState& state);
  void forward();
  void backward(const AttentionGradients& gradients);

 private:
  // Keys and values that lie together; the distance between rows in elements.
  struct Keys {
    const void *keys, *values;
    int64_t stride;
  };

  TensorView allocate(DType dtype, Shape shape) const { return exec_.scratch->allocate(dtype, shape); }
  template <typename T>
  T* array(int64_t count) const {
    return exec_.scratch->allocate_array<T>(count);
  }
  float* floats(size_t count) const { return array<float>(static_cast<int64_t>(count)); }
  int64_t bytes(int64_t elements) const { return elements * dtype_bytes(dtype_); }

  int64_t piece() const { return state_.plan ? state_.plan->piece() : state_.piece; }
  const int32_t* given() const { return state_.plan ? state_.plan->given() : state_.given.data(); }
  int64_t given_count() const { return state_.plan ? state_.plan->given_count() : state_.given.count(); }
  // [rank · piece + number][key, value][kv_heads · d]
  int64_t piece_elements() const { return piece() * 2 * key_width_; }
  int64_t pieces_elements() const { return ring_.data.size() * piece_elements(); }
  Keys gathered_copies() const;
  void return_copies(const TensorView& pieces, const TensorView& dk, const TensorView& dv) const;

  template <typename Body>
  void each_pass(int chunk, const Body& body) const;
  TensorView gather(const void* from, int64_t stride, Shape shape, const int32_t* rows) const;
  AttentionOperands assemble(const PassRun& pass, const Keys& keys) const;
  void forward_pass(const PassRun& pass, const Keys& keys) const;
  // The same for a pass of a piece.
  AttentionOperands piece_operands(const PassRun& pass, const Keys& keys) const;
  void forward_piece(const PassRun& pass, const Keys& keys) const;
  void backward_piece(const PassRun& pass, const Keys& keys, float* dk, float* dv, int64_t stride) const;
  void backward_pass(const PassRun& pass, const Keys& keys, float* dk, float* dv, int64_t stride) const;
  const gpu::ForwardItem* items_of(const PassRun& pass) const;
  template <typename Params>
  void set_common(const PassRun& pass, const AttentionOperands& y, Params& params) const;
  void run_forward(const PassRun& pass, const AttentionOperands& y) const;
  void run_backward(const PassRun& pass, const AttentionOperands& y, const AttentionGradients& h) const;

  const Ring ring_;
  const Exec& exec_;
  const int layer_;
  const AttentionShape& shape_;
  const AttentionOperands& x_;
  const AttentionGradients* g_ = nullptr;
  const CudaRingState& state_;
  const DType dtype_;
  const int64_t key_width_, query_width_;
  std::vector<int64_t> chunk_elements_;  // of the keys of every rank
  TensorView sum_;                       // in fp32: the output, or the gradient of the queries
};

}  // namespace sb
