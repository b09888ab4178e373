#pragma once

// What attention on CUDA prepares on the host for one kind of micro-batch, in device memory, and the memory itself.

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "attention/gpu/coverage/coverage.h"
#include "attention/gpu/plan/work.h"
#include "attention/gpu/select/select.h"
#include "attention/gpu/select/vertical_slash.h"
#include "attention/index/block_index.h"

namespace sb::gpu {

// Device memory that only grows. What is queued on the one stream that uses it keeps its order, so contents may be
// overwritten while older work still waits.
class DeviceBuffer {
 public:
  void* ensure(const char* name, int64_t bytes);
  // So many bytes, without the room to grow that ensure() adds.
  void reserve(const char* name, int64_t bytes);
  // From now on memory of the caller, which does not grow: ensure() is a UserError where it is too small.
  void borrow(void* memory, int64_t bytes);
  bool borrowed() const { return borrowed_; }
  void* data() const { return memory_.get(); }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0;
  bool borrowed_ = false;
};

// Places of arrays in one piece of memory.
class Layout {
 public:
  template <typename T>
  int64_t add(int64_t count) {
    const int64_t at = (bytes_ + 255) / 256 * 256;
    bytes_ = at + count * static_cast<int64_t>(sizeof(T));
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// Arrays on their way to one piece of device memory.
class Upload {
 public:
  template <typename T>
  int64_t add(const std::vector<T>& array) {
    const int64_t at = layout_.add<T>(std::ssize(array));
    arrays_.push_back({at, array.data(), array.size() * sizeof(T)});
    return at;
  }
  template <typename T>
  int64_t add(const T* value) {
    const int64_t at = layout_.add<T>(1);
    arrays_.push_back({at, value, sizeof(T)});
    return at;
  }
  int64_t bytes() const { return layout_.bytes(); }
  void fill(char* host) const {
    for (const Array& array : arrays_)
      if (array.bytes > 0) std::memcpy(host + array.at, array.data, array.bytes);
  }

 private:
  struct Array {
    int64_t at;
    const void* data;
    size_t bytes;
  };
  Layout layout_;
  std::vector<Array> arrays_;
};

// Page-locked memory on its way to the device, reused in turns.
class Staging {
 public:
  // A piece of at least `bytes`; waits only if the copy that used it some rounds ago is still not done.
  char* take(int64_t bytes);
  // Room for pieces of so many bytes in all turns.
  void reserve(int64_t bytes);
  // Copies the piece taken last.
  void send(void* stream, void* to, int64_t bytes);

 private:
  struct Slot {
    std::shared_ptr<void> memory, event;
    int64_t bytes = 0;
    bool used = false;
  };
  std::vector<Slot> slots_{16};
  size_t current_ = 0;
};

struct PlanRequest {
  Shape shape;
  Precision precision = Precision::bf16;
  bool hopper = false;
  std::span<const int32_t> cu_seqlens;
  std::vector<bool> dense;
  std::vector<SequenceTiles> tiles;
  bool piece = false;  // the only sequence is a piece of the one that `tiles` is about, from shape.first_query on
  const SelectionConfig* selection = nullptr;
  int multiprocessors = 0;
  int64_t batch_masses = 0;
  int coverage_rows = 0;              // tokens of every sequence on which coverage is measured
  const BlockIndex* index = nullptr;  // lists that are given instead of selected
};

class DevicePlan {
 public:
  // Builds the plan and queues its upload; for plans without lists also the order of the backward's work.
  void build(const PlanRequest& request, Staging& staging, void* stream);
  bool matches(const PlanRequest& request) const;
  // Device memory, for a plan to be built later; and what a built one has taken.
  void reserve(int64_t bytes) { memory_.reserve("attention plan", bytes); }
  int64_t bytes() const { return own_lists_ + (sparse_ ? 0 : lists_.bytes); }
  int64_t uploaded_bytes() const { return own_lists_; }

  const Shape& shape() const { return shape_; }
  bool sparse() const { return sparse_; }
  const Work& work() const { return work_; }
  const SelectPlan& select() const { return select_; }
  Precision precision() const { return precision_; }
  bool hopper() const { return hopper_; }
  int list_heads() const { return list_heads_; }
  // What the configuration or the given lists say.
  int index_block() const { return index_block_; }
  int index_query_block() const { return index_query_block_; }
  int sequences() const { return static_cast<int>(cu_seqlens_.size()) - 1; }
  const std::vector<int32_t>& cu_seqlens() const { return cu_seqlens_; }
  const std::vector<bool>& dense() const { return dense_; }
  int64_t causal_pairs() const { return causal_pairs_; }  // over the list heads
  BackwardPairs backward_pairs() const { return {select_.entries, work_.gathered_words, dense_pairs_, causal_pairs_}; }
  int64_t statistics_bytes() const;
  // Of them, what later pieces need, and the rest.
  int64_t kept_bytes() const;
  int64_t room_bytes() const;
  bool piece() const { return piece_; }
  // What forward or backward of a piece takes of scratch besides a copy of its keys and values; measuring coverage as
  // much as in any piece that is no longer, of a sequence that is no longer.
  int64_t piece_scratch_bytes() const;
  int64_t pool_counts() const { return pool_counts_size(pool_count_, select_.pool_tiles); }
  int64_t list_bytes() const { return lists_.bytes; }

  // Arrays that belong to a state when there are lists, to the plan when there are none.
  struct Lists {
    uint32_t* row_entries = nullptr;
    uint32_t* column_entries = nullptr;
    int32_t* column_offsets = nullptr;
    BackwardItem* items = nullptr;
    SplitColumn* splits = nullptr;
    WorkCounts* counts = nullptr;
    int32_t* gathered_columns = nullptr;
    uint64_t* gathered_bits = nullptr;
  };
  Lists lists_in(void* memory) const;
  void* own_lists() const { return static_cast<char*>(memory_.data()) + own_lists_; }

  void set(SelectParams& params) const;
  void set(BackwardWorkParams& params) const;
  void set(ForwardParams& params) const;
  void set(BackwardParams& params) const;
  void set(CoverageParams& params) const;
  void set(SlashParams& params) const;
  // With the columns and bits of one state.
  GatheredColumns gathered(const Lists& lists) const;
  const SlashPlan& slash() const { return slash_; }
  const CoveragePlan& coverage() const { return coverage_; }
  // In device memory: the class of every sequence, and the tokens sampled for the energies of planes.
  const int32_t* mass_classes() const { return at<int32_t>(places_.mass_classes); }
  const int32_t* samples() const { return at<int32_t>(places_.samples); }
  int32_t sample_count() const { return sample_count_; }

 private:
  template <typename T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(static_cast<const char*>(memory_.data()) + offset);
  }
  // Row lists of the sequences that are not dense, and where they lie.
  RowLayout plan_lists(const PlanRequest& request);
  // What goes to the device, and where it will lie in the plan's memory; the same for lists in theirs.
  void place(Upload& upload);
  void place_lists();
  // Host copies of what only the device reads.
  void forget_uploaded();

  Shape shape_;
  Precision precision_ = Precision::bf16;
  bool hopper_ = false, sparse_ = false, piece_ = false;
  std::vector<int32_t> cu_seqlens_;
  std::vector<bool> dense_;
  std::vector<int64_t> budgets_, lengths_;
  Work work_;              // vectors emptied once they are on the device
  SelectPlan select_;      // likewise, but for the batches and the row offsets
  CoveragePlan coverage_;  // likewise, but for the sequences
  SlashPlan slash_;
  std::vector<int32_t> samples_;  // likewise
  int list_heads_ = 0, index_block_ = 0, index_query_block_ = 0;
  int64_t dense_pairs_ = 0, causal_pairs_ = 0;
  int32_t forward_count_ = 0, block_count_ = 0, group_count_ = 0, pool_count_ = 0, coverage_count_ = 0,
          sample_count_ = 0;
  struct {
    int64_t cu_seqlens, cu_subtiles, forward, places, scores, score_rows, items, blocks, groups, pools, mass_classes,
        samples, coverage_sequences, coverage_tokens, coverage_lists, coverage_grid, gathered, gathered_pieces,
        slash_sequences;
  } places_{};
  struct {
    int64_t row_entries, column_entries, column_offsets, items, splits, counts, gathered_columns, gathered_bits, bytes;
  } lists_{};
  int64_t own_lists_ = 0;
  DeviceBuffer memory_;
};

}  // namespace sb::gpu
