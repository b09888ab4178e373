#include "attention/index/block_index.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb {
namespace {

constexpr int kColumnStripe = 32;  // key blocks that one task of build_columns transposes

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

void BlockIndex::lay_out(const BlockIndexShape& s, std::span<const int32_t> cu_seqlens,
                         std::span<const uint8_t> dense) {
  shape_ = s;
  SB_CHECK(s.block == 64 || s.block == 128 || s.block == 256, "key block of {}", s.block);
  SB_CHECK(s.query_block >= 1 && s.query_block <= 128, "query block of {}", s.query_block);
  SB_CHECK(s.list_heads >= 1, "{} list heads", s.list_heads);
  SB_CHECK(!cu_seqlens.empty() && cu_seqlens[0] == 0, "cu_seqlens must begin with 0");
  SB_CHECK(dense.empty() || dense.size() == cu_seqlens.size() - 1, "{} dense flags for {} sequences", dense.size(),
           cu_seqlens.size() - 1);
  sequences_.clear();
  rows_ = columns_ = 0;
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    SB_CHECK(cu_seqlens[i + 1] >= cu_seqlens[i], "cu_seqlens falls at {}", i + 1);
    Sequence sequence;
    sequence.token_begin = cu_seqlens[i];
    sequence.length = cu_seqlens[i + 1] - cu_seqlens[i];
    sequence.dense = !dense.empty() && dense[i] != 0;
    sequence.row_begin = rows_;
    sequence.column_begin = columns_;
    if (!sequence.dense) {
      sequence.query_blocks = static_cast<int32_t>(ceil_div(sequence.length, s.query_block));
      sequence.key_blocks = static_cast<int32_t>(ceil_div(sequence.length, s.block));
      SB_CHECK(sequence.key_blocks <= 65536 && sequence.query_blocks < (1 << 25),
               "a sequence of {} tokens has too many blocks of {}", sequence.length, s.block);
      rows_ += int64_t{s.list_heads} * sequence.query_blocks;
      columns_ += int64_t{s.list_heads} * sequence.key_blocks;
    }
    sequences_.push_back(sequence);
  }
  row_blocks_.clear();
  row_first_.clear();
  gathered_.clear();
  column_entries_.clear();
  row_offsets_.assign(rows_ + 1, 0);
  gathered_offsets_.assign(rows_ + 1, 0);
  column_offsets_.assign(columns_ + 1, 0);
}

BlockIndex::Place BlockIndex::place_of(int64_t row) const {
  SB_CHECK(row >= 0 && row < rows_, "row {} of {}", row, rows_);
  // The last sequence that begins at or before the row; empty and dense ones have no rows and are passed over.
  auto after = std::upper_bound(sequences_.begin(), sequences_.end(), row,
                                [](int64_t value, const Sequence& sequence) { return value < sequence.row_begin; });
  const Sequence& sequence = *(after - 1);
  const int64_t offset = row - sequence.row_begin;
  return {&sequence, static_cast<int>(offset / sequence.query_blocks),
          static_cast<int>(offset % sequence.query_blocks)};
}

int BlockIndex::query_tokens(const Sequence& sequence, int query_block) const {
  return std::min(shape_.query_block, sequence.length - query_block * shape_.query_block);
}

// Every task owns a stripe of key blocks of one (sequence, list head) and scans that head's rows: twice, first to
// count, then to place. No two tasks write the same column, so there is nothing to synchronise and the order is fixed.
void BlockIndex::build_columns(ThreadPool& pool) {
  struct Stripe {
    const Sequence* sequence;
    int list_head, begin, end;
  };
  std::vector<Stripe> stripes;
  for (const Sequence& sequence : sequences_) {
    for (int head = 0; head < shape_.list_heads; ++head) {
      for (int begin = 0; begin < sequence.key_blocks; begin += kColumnStripe) {
        stripes.push_back({&sequence, head, begin, std::min(begin + kColumnStripe, sequence.key_blocks)});
      }
    }
  }
  const auto scan = [&](const Stripe& stripe, auto&& visit) {
    const Sequence& sequence = *stripe.sequence;
    // Rows before the stripe's first key cannot have selected it.
    const int first_row = static_cast<int>(int64_t{stripe.begin} * shape_.block / shape_.query_block);
    for (int query_block = first_row; query_block < sequence.query_blocks; ++query_block) {
      const int64_t id = row_id(sequence, stripe.list_head, query_block);
      const uint16_t* blocks = row_blocks_.data();
      const uint32_t end = row_offsets_[id + 1];
      uint32_t i =
          static_cast<uint32_t>(std::lower_bound(blocks + row_offsets_[id], blocks + end, stripe.begin) - blocks);
      for (; i < end && blocks[i] < stripe.end; ++i) visit(query_block, blocks[i], row_first_[i]);
    }
  };
  pool.parallel_for(static_cast<int64_t>(stripes.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Stripe& stripe = stripes[i];
      uint32_t* counts = &column_offsets_[column_id(*stripe.sequence, stripe.list_head, 0)];
      scan(stripe, [&](int, int block, int) { ++counts[block]; });
    }
  });
  std::exclusive_scan(column_offsets_.begin(), column_offsets_.end(), column_offsets_.begin(), uint32_t{0});
  column_entries_.resize(row_blocks_.size());
  pool.parallel_for(static_cast<int64_t>(stripes.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Stripe& stripe = stripes[i];
      const uint32_t* offsets = &column_offsets_[column_id(*stripe.sequence, stripe.list_head, stripe.begin)];
      uint32_t next[kColumnStripe];
      std::copy_n(offsets, stripe.end - stripe.begin, next);
      scan(stripe, [&](int query_block, int block, int first) {
        column_entries_[next[block - stripe.begin]++] = static_cast<uint32_t>(query_block) << 7 | first;
      });
    }
  });
}

BlockIndex::Row BlockIndex::row(int64_t id) const {
  const uint32_t begin = row_offsets_[id], count = row_offsets_[id + 1] - begin;
  const uint32_t gathered = gathered_offsets_[id];
  return {{row_blocks_.data() + begin, count},
          {row_first_.data() + begin, count},
          {gathered_.data() + gathered, gathered_offsets_[id + 1] - gathered}};
}

std::span<const uint32_t> BlockIndex::column(int64_t id) const {
  return {column_entries_.data() + column_offsets_[id], column_offsets_[id + 1] - column_offsets_[id]};
}

int64_t BlockIndex::row_token_pairs(const Sequence& sequence, int query_block, const Row& row) const {
  const int64_t begin = int64_t{query_block} * shape_.query_block;
  const int64_t end = begin + query_tokens(sequence, query_block);
  int64_t pairs = 0;
  for (size_t i = 0; i < row.blocks.size(); ++i) {
    const int64_t key = int64_t{row.blocks[i]} * shape_.block;
    const int64_t keys = std::min<int64_t>(shape_.block, sequence.length - key);
    // Tokens from `from` on see a growing part of the block, from `full` on all of it.
    const int64_t from = std::max(begin + row.first[i], key),
                  full = std::clamp(key + keys - 1, from, std::max(from, end));
    const int64_t partial = std::min(full, end);
    if (from < end) pairs += causal_triangle(partial - key) - causal_triangle(from - key) + (end - partial) * keys;
  }
  for (const int32_t column : row.columns) pairs += end - std::max<int64_t>(begin, column);
  return pairs;
}

int64_t BlockIndex::token_pairs() const {
  int64_t pairs = 0;
  for (const Sequence& sequence : sequences_) {
    if (sequence.dense) pairs += causal_triangle(sequence.length) * shape_.list_heads;
    for (int head = 0; head < shape_.list_heads; ++head) {
      for (int i = 0; i < sequence.query_blocks; ++i) {
        pairs += row_token_pairs(sequence, i, row(row_id(sequence, head, i)));
      }
    }
  }
  return pairs;
}

int64_t BlockIndex::causal_token_pairs() const {
  int64_t pairs = 0;
  for (const Sequence& sequence : sequences_) pairs += causal_triangle(sequence.length) * shape_.list_heads;
  return pairs;
}

int64_t BlockIndex::bytes() const {
  return static_cast<int64_t>(sequences_.size() * sizeof(Sequence) + row_blocks_.size() * 2 + row_first_.size() +
                              4 * (row_offsets_.size() + gathered_offsets_.size() + gathered_.size() +
                                   column_offsets_.size() + column_entries_.size()));
}

bool BlockIndex::operator==(const BlockIndex& other) const {
  return shape_ == other.shape_ && sequences_ == other.sequences_ && row_offsets_ == other.row_offsets_ &&
         row_blocks_ == other.row_blocks_ && row_first_ == other.row_first_ &&
         gathered_offsets_ == other.gathered_offsets_ && gathered_ == other.gathered_;
}

}  // namespace sb
