#include <algorithm>
#include <limits>

#include "attention/index/block_index.h"
#include "core/errors.h"

namespace sb {

void BlockIndexBuilder::begin(BlockIndex& index, const BlockIndexShape& shape, std::span<const int32_t> cu_seqlens,
                              std::span<const uint8_t> dense, int threads) {
  index_ = &index;
  index.lay_out(shape, cu_seqlens, dense);
  staged_.assign(index.rows(), StagedRow{});
  entries_.begin(threads);
  columns_.begin(threads);
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
  SB_CHECK(index_ != nullptr && thread >= 0 && thread < entries_.threads(), "thread {} of {}", thread,
           entries_.threads());
  check_row(row, entries, columns);
  SB_CHECK(staged_[row].thread < 0, "row {} is set twice", row);
  staged_[row] = {thread, static_cast<uint32_t>(entries.size()), static_cast<uint32_t>(columns.size()),
                  entries_.append(thread, entries), columns_.append(thread, columns)};
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
      uint32_t next = index.row_offsets_[row];
      entries_.read(staged.thread, staged.entry_begin, staged.entries, [&](std::span<const IndexEntry> part) {
        for (const IndexEntry& entry : part) {
          index.row_blocks_[next] = entry.block;
          index.row_first_[next++] = entry.first;
        }
      });
      auto to = index.gathered_.begin() + index.gathered_offsets_[row];
      columns_.read(staged.thread, staged.column_begin, staged.columns,
                    [&](std::span<const int32_t> part) { to = std::copy(part.begin(), part.end(), to); });
    }
  });
  index.build_columns(pool);
  index_ = nullptr;
}

int64_t BlockIndexBuilder::bytes() const {
  return static_cast<int64_t>(staged_.capacity() * sizeof(StagedRow)) + entries_.bytes() + columns_.bytes();
}

int64_t BlockIndexBuilder::most_bytes(int64_t rows, int64_t entries, int64_t columns, int threads) {
  return rows * static_cast<int64_t>(sizeof(StagedRow)) + StagedValues<IndexEntry>::most_bytes(entries, threads) +
         StagedValues<int32_t>::most_bytes(columns, threads);
}

}  // namespace sb
