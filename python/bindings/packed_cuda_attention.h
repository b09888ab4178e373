#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "attention/gpu/cuda_attention.h"
#include "python/bindings/packed_call.h"

namespace sb::python {

// Attention over packed sequences on a CUDA device, in bf16 or fp32: a function of its arguments alone, as
// PackedAttention. Everything is queued on the one stream it was made for, and nothing waits; between calls it keeps
// the work plans of the micro-batches seen last, which follow from their lengths and budgets. Not for vertical_slash.
class PackedCudaAttention {
 public:
  struct Options {
    int64_t largest_budget = 0;  // that a call may bring; 0: the configured one
    bool deterministic = false;  // the same bits in every run, somewhat slower backward
    bool portable = false;       // the portable kernels even where there are faster ones
  };
  PackedCudaAttention(const SelectionConfig& config, const Options& options, int device, void* stream);

  // Device memory for temporaries of a call.
  int64_t scratch_bytes(const AttentionShape& shape, int64_t tokens) const;
  // `host_lists`: where not empty, gets the lists as PackedAttention has them, for which the call waits.
  void forward(const PackedCall& call, const PackedSeen& seen, std::span<uint8_t> scratch,
               std::span<uint8_t> host_lists);
  void backward(const PackedCall& call, const AttentionGradients& gradients, std::span<uint8_t> scratch);
  const SelectionConfig& config() const { return config_; }

 private:
  // The sequences that are not empty.
  struct Present {
    std::vector<int32_t> cu_seqlens{0}, budgets, places;  // places: which one of the call's
    PackedSequences sequences() const { return {cu_seqlens, budgets}; }
  };
  Present present(const PackedCall& call) const;
  int layer_of(int layer) const;

  SelectionConfig config_;
  int layers_, device_;
  void* stream_;
  std::unique_ptr<SelectingAttention> attention_;
  std::mutex busy_;
};

}  // namespace sb::python
