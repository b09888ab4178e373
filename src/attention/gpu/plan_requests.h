#pragma once

#include "attention/gpu/cuda_attention.h"
#include "attention/gpu/plan/device_plan.h"
#include "device/cuda.h"

namespace sb::gpu {

// Masses of so many (token, key block) are held at a time, two bytes each.
constexpr int64_t kBatchMasses = int64_t{1} << 26;

// Whether the Hopper kernels run.
bool hopper_takes(const CudaAttentionOptions& options, const AttentionShape& shape, DType dtype, int major);

// Of the largest plan of a micro-batch, and of the largest one of a piece.
struct PlanSize {
  AttentionShape shape = {};
  int64_t max_tokens = 0;
  DType dtype = DType::bf16;
  int64_t device = 0, uploaded = 0;  // bytes
};
struct PieceSize {
  AttentionShape shape = {};
  int64_t max_tokens = 0, longest = 0;
  DType dtype = DType::bf16;
  int64_t device = 0, uploaded = 0, lists = 0, kept = 0, scratch = 0;  // bytes
};

// What is asked of the plan of a micro-batch, and the most that any plan may take. `options` and `device` outlive it.
class PlanRequests {
 public:
  PlanRequests(const CudaAttentionOptions& options, const cuda::DeviceInfo& device)
      : options_(options), device_(device) {}

  PlanRequest of(int layer, const AttentionShape& shape, const PackedSequences& sequences, DType dtype) const;
  const PlanSize& largest_plan(const AttentionShape& shape, int64_t max_tokens, DType dtype) const;
  const PieceSize& largest_piece(const AttentionShape& shape, const Attention::PieceLimits& limits) const;

 private:
  const SelectionConfig& selection() const { return options_.attention.selection; }

  const CudaAttentionOptions& options_;
  const cuda::DeviceInfo& device_;
  mutable PlanSize largest_plan_;    // the one asked for last
  mutable PieceSize largest_piece_;  // likewise
};

}  // namespace sb::gpu
