#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "attention/forwarding_attention.h"
#include "model/tensor_parallel/tensor_share.h"

namespace sb::test {

// The pairs that one run selected, by layer and length of the sequence (lengths must differ), for other runs to use
// again however the sequences are packed: selection is discontinuous, and so it is compared on its own.
class RecordedSelections {
 public:
  void record(int layer, const BlockIndex& index) {
    std::lock_guard lock(mutex_);
    shape_ = index.shape();
    for (const BlockIndex::Sequence& sequence : index.sequences()) {
      Selection& selection = selections_[{layer, sequence.length}];
      selection = {sequence.dense, {}};
      const int64_t rows = int64_t{sequence.query_blocks} * shape_.list_heads;
      for (int64_t i = 0; i < rows; ++i) {
        const BlockIndex::Row row = index.row(sequence.row_begin + i);
        std::vector<IndexEntry>& entries = selection.rows.emplace_back();
        for (size_t e = 0; e < row.blocks.size(); ++e) entries.push_back({row.blocks[e], row.first[e]});
      }
    }
  }

  // Of a piece: the rows of its own tokens. Of a rank that shares products: the lists of its own heads.
  void replay(const Exec& exec, int layer, const PackedSequences& sequences, BlockIndex& index,
              const TensorShare& share = {}) const {
    BlockIndexShape shape = shape_;
    shape.list_heads /= share.ranks;
    std::vector<const Selection*> wanted;
    std::vector<uint8_t> dense;
    const bool piece = sequences.is_piece();
    const std::span<const int32_t> cu_seqlens =
        sequences.whole_cu_seqlens.empty() ? sequences.cu_seqlens : sequences.whole_cu_seqlens;
    for (int s = 0; s < sequences.sequences(); ++s) {
      const int64_t tokens = cu_seqlens[s + 1] - cu_seqlens[s];
      wanted.push_back(&selections_.at({layer, static_cast<int32_t>(piece ? sequences.piece.length : tokens)}));
      dense.push_back(wanted.back()->dense);
    }
    BlockIndexBuilder builder;
    const int32_t up_to_piece[] = {0, static_cast<int32_t>(sequences.piece_end())};
    builder.begin(index, shape, piece ? std::span<const int32_t>(up_to_piece) : cu_seqlens, dense, 1);
    for (size_t s = 0; s < wanted.size(); ++s) {
      const BlockIndex::Sequence& place = index.sequences()[s];
      const int64_t whole = std::ssize(wanted[s]->rows) / shape_.list_heads;  // query blocks
      for (int head = 0; head < shape.list_heads; ++head)
        for (int block = static_cast<int>(sequences.piece.begin) / shape_.query_block; block < place.query_blocks;
             ++block)
          builder.set_row(0, BlockIndex::row_id(place, head, block),
                          wanted[s]->rows[static_cast<size_t>((share.rank * shape.list_heads + head) * whole + block)]);
    }
    builder.finish(*exec.pool);
  }

 private:
  struct Selection {
    bool dense = false;
    std::vector<std::vector<IndexEntry>> rows;
  };
  std::mutex mutex_;
  BlockIndexShape shape_;
  std::map<std::pair<int, int32_t>, Selection> selections_;
};

// Sparse attention that records its selections, or uses recorded ones. `index`: what a state of it holds.
class ReplayedAttention final : public ForwardingAttention {
 public:
  using IndexOf = BlockIndex& (*)(AttentionState&);
  ReplayedAttention(Attention& inner, RecordedSelections& selections, bool record,
                    IndexOf index = &SparseAttention::index, TensorShare share = {})
      : ForwardingAttention(inner), selections_(selections), record_(record), index_(index), share_(share) {}

  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    if (!record_ && !replay) selections_.replay(exec, layer, sequences, index_(state), share_);
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay || !record_);
    if (record_) selections_.record(layer, index_(state));
  }

 private:
  RecordedSelections& selections_;
  bool record_;
  IndexOf index_;
  TensorShare share_;
};

}  // namespace sb::test
