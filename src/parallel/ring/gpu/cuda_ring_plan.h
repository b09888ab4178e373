#pragma once

// What a ring of GPUs prepares on the host for one kind of micro-batch, in device memory.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/gpu/plan/device_plan.h"
#include "parallel/ring/gpu/ring_lists.h"

namespace sb::gpu {

struct RingPlanRequest {
  ContextPlacement placement = ContextPlacement::triangular;
  int ranks = 1, rank = 0;
  std::span<const int32_t> cu_seqlens;  // of the whole sequences
  std::vector<SequenceTiles> tiles;     // likewise
  std::vector<bool> dense;
  AttentionShape shape{};
  Precision precision = Precision::bf16;
  bool hopper = false;
  const SelectionConfig* selection = nullptr;
  int multiprocessors = 1;
  int64_t batch_masses = 0;
  int coverage_rows = 0;
};

class CudaRingPlan {
 public:
  // The sparse or the dense sequences: their query blocks differ, and lists of dense ones are always the same.
  struct Set {
    bool dense = false;
    RingListPlan plan;  // what went to the device is empty, but for rows and blocks
    Shape shape;        // of this rank's tokens
    int32_t row_count = 0, group_count = 0, block_count = 0, columns = 0;
    struct Pass {
      int64_t tokens = 0;
      int64_t keys, queries, items, places, cu_seqlens, cu_subtiles;  // in the plan's memory
      int32_t item_count = 0, sequences = 0, first_column = 0;
      Work work;
    };
    std::vector<Pass> passes;
    int64_t rows, blocks, groups, sources, head_columns, statistics, scores, score_rows, items, select_blocks,
        mass_classes;
    int64_t list_bytes = 0;
    int64_t list_row_entries, list_pass_begin, list_column_entries, list_column_offsets;
    int64_t own_lists = 0;  // of dense sequences, in the plan's memory
  };
  struct Lists {
    uint32_t* row_entries = nullptr;
    int32_t* pass_begin = nullptr;
    uint32_t* column_entries = nullptr;
    int32_t* column_offsets = nullptr;
  };

  // Builds the plan and queues its upload; lists of dense sequences are made by the caller.
  void build(const RingPlanRequest& request, Staging& staging, void* stream);
  bool matches(const RingPlanRequest& request) const;
  // Device memory, for a plan to be built later; and what a built one has taken.
  void reserve(int64_t bytes) { memory_.reserve("ring plan", bytes); }
  int64_t bytes() const { return bytes_; }
  int64_t uploaded_bytes() const { return uploaded_; }

  const ContextLayout& layout() const { return *layout_; }
  const std::vector<Set>& sets() const { return sets_; }
  const Set* sparse() const { return !sets_.empty() && !sets_.front().dense ? &sets_.front() : nullptr; }
  Lists lists_in(const Set& set, void* memory) const;
  Lists own_lists(const Set& set) const { return lists_in(set, memory(set.own_lists)); }
  // Copies of keys: tokens of this rank that the others get, and the most any rank gives.
  const int32_t* given() const { return at<int32_t>(given_); }
  int64_t given_count() const { return given_count_; }
  int64_t piece() const { return piece_; }
  bool hopper() const { return hopper_; }
  Precision precision() const { return precision_; }
  // (query, key) pairs of this rank over the list heads, if every query block uses all it may, dense sequences
  // included.
  int64_t pairs() const { return pairs_; }
  int64_t dense_pairs() const { return dense_pairs_; }    // of its dense sequences
  int64_t causal_pairs() const { return causal_pairs_; }  // were everything dense
  // Tokens of this rank that are sampled for the energies of planes.
  const int32_t* samples() const { return at<int32_t>(samples_); }
  int32_t sample_count() const { return sample_count_; }

  void set(const Set& set, SelectParams& params) const;
  void set(const Set& set, RingCutParams& params) const;
  // The lists of the sparse sequences, in `memory`, as an index of the whole ones with the rows of this rank. Waits for
  // the device.
  BlockIndex read_index(void* memory, ThreadPool& pool) const;
  // Coverage: where sampled tokens' queries come from (rows of q, or -1), and the rest.
  const CoveragePlan& coverage() const { return coverage_; }
  int32_t sampled() const { return sampled_; }
  const int32_t* sampled_rows() const { return at<int32_t>(coverage_rows_); }
  void set(CoverageParams& params) const;

  template <typename T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(memory_.data()) + offset);
  }

 private:
  void* memory(int64_t offset) const { return static_cast<char*>(memory_.data()) + offset; }
  void plan_set(const RingPlanRequest& request, bool dense, const ReplicatedKeys& replicated);
  void plan_coverage(const RingPlanRequest& request);
  void count_pairs();
  // What goes to the device, and where it will lie in the plan's memory.
  void add_coverage(Upload& upload);
  static void add_set(Upload& upload, Set& set);
  // Host copies of what only the device reads.
  void forget_uploaded();

  std::unique_ptr<ContextLayout> layout_;
  int rank_ = 0;
  AttentionShape attention_{};
  Precision precision_ = Precision::bf16;
  bool hopper_ = false;
  std::vector<bool> dense_;
  std::vector<int64_t> budgets_;
  std::vector<Set> sets_;  // the sparse one first
  CoveragePlan coverage_;  // vectors emptied, but for the sequences
  std::vector<CoverageBlock> coverage_held_;
  std::vector<int32_t> coverage_own_, coverage_sampled_;
  int32_t sampled_ = 0, held_count_ = 0, own_count_ = 0, sample_count_ = 0;
  int64_t given_ = 0, given_count_ = 0, piece_ = 0, samples_ = 0;
  int64_t pairs_ = 0, dense_pairs_ = 0, causal_pairs_ = 0, bytes_ = 0, uploaded_ = 0;
  int64_t coverage_sequences_ = 0, coverage_tokens_ = 0, coverage_lists_ = 0, coverage_grid_ = 0, coverage_blocks_ = 0,
          coverage_own_tokens_ = 0, coverage_rows_ = 0;
  DeviceBuffer memory_;
};

}  // namespace sb::gpu
