#include <algorithm>
#include <limits>

#include "attention/block_index.h"
#include "core/errors.h"

namespace sb {

void BlockIndexBuilder::begin(BlockIndex& index, const BlockIndexShape& shape, std::span<const int32_t> cu_seqlens,
                              std::span<const uint8_t> dense, int threads) {
  index_ = &index;
  index.lay_out(shape, cu_seqlens, dense);
  staged_.assign(index.rows(), StagedRow{});
  staging_.resize(threads);
  for (Staging& staging : staging_) {
    staging.entries.clear();
    staging.columns.clear();
  }
}

void BlockIndexBuilder::check_row(int64_t row, std::span<const IndexEntry> entries,
                                  std::span<const int32_t> columns) const {
  const auto [sequence, head, query_block] = index_->place_of(row);
  const BlockIndexShape& shape = index_->shape();
  const int tokens = index_->query_tokens(*sequence, query_block);
  const int64_t last_token = int64_t{query_block} * shape.query_block + tokens - 1;
  int previous = -1;
  for (const IndexEntry& entry : entries) {
    SB_CHECK(entry.block > previous, "row {}: block {} after {}", row, entry.block, previous);
    SB_CHECK(entry.first < tokens, "row {}: first token {} of {}", row, entry.first, tokens);
    previous = entry.block;
  }
  SB_CHECK(int64_t{previous} * shape.block <= last_token, "row {}: block {} lies after token {}", row, previous,
           last_token);
  int64_t last_column = -1;
  auto entry = entries.begin();
  for (const int32_t column : columns) {
    SB_CHECK(column > last_column && column <= last_token, "row {}: column {} after {}, last token {}", row, column,
             last_column, last_token);
    while (entry != entries.end() && entry->block < column / shape.block) ++entry;
    SB_CHECK(entry == entries.end() || entry->block != column / shape.block, "row {}: column {} is in block {} too",
             row, column, column / shape.block);
    last_column = column;
  }
}

void BlockIndexBuilder::set_row(int thread, int64_t row, std::span<const IndexEntry> entries,
                                std::span<const int32_t> columns) {
  SB_CHECK(index_ != nullptr && thread >= 0 && thread < static_cast<int>(staging_.size()), "thread {} of {}", thread,
           staging_.size());
  check_row(row, entries, columns);
  SB_CHECK(staged_[row].thread < 0, "row {} is set twice", row);
  Staging& staging = staging_[thread];
  staged_[row] = {thread, static_cast<uint32_t>(entries.size()), static_cast<uint32_t>(columns.size()),
                  static_cast<int64_t>(staging.entries.size()), static_cast<int64_t>(staging.columns.size())};
  staging.entries.insert(staging.entries.end(), entries.begin(), entries.end());
  staging.columns.insert(staging.columns.end(), columns.begin(), columns.end());
}

void BlockIndexBuilder::finish(ThreadPool& pool) {
  SB_CHECK(index_ != nullptr, "finish without begin");
  BlockIndex& index = *index_;
  const int64_t rows = index.rows();
  int64_t entries = 0, gathered = 0;
  for (int64_t row = 0; row <= rows; ++row) {
    SB_CHECK(entries <= std::numeric_limits<uint32_t>::max() && gathered <= std::numeric_limits<uint32_t>::max(),
             "more than 2^32 pairs of blocks");
    index.row_offsets_[row] = static_cast<uint32_t>(entries);
    index.gathered_offsets_[row] = static_cast<uint32_t>(gathered);
    if (row == rows) break;
    entries += staged_[row].entries;
    gathered += staged_[row].columns;
  }
  index.row_blocks_.resize(entries);
  index.row_first_.resize(entries);
  index.gathered_.resize(gathered);
  pool.parallel_for(rows, 256, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const StagedRow& staged = staged_[row];
      if (staged.thread < 0) continue;
      const Staging& staging = staging_[staged.thread];
      for (uint32_t i = 0; i < staged.entries; ++i) {
        const IndexEntry& entry = staging.entries[staged.entry_begin + i];
        index.row_blocks_[index.row_offsets_[row] + i] = entry.block;
        index.row_first_[index.row_offsets_[row] + i] = entry.first;
      }
      std::copy_n(staging.columns.begin() + staged.column_begin, staged.columns,
                  index.gathered_.begin() + index.gathered_offsets_[row]);
    }
  });
  index.build_columns(pool);
  index_ = nullptr;
}

}  // namespace sb
