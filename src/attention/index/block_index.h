#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/index/staged_values.h"
#include "core/thread_pool.h"

namespace sb {

// Pairs of n tokens that each see themselves and those before them.
inline int64_t causal_triangle(int64_t n) {
  return n * (n + 1) / 2;
}

// Where the tokens of a sequence lie in packed tensors when its queries and its keys are not the same tokens: the
// tokens before `keys` are keys, in the rows of k and v from key_row on; those from `first_query` (a multiple of the
// query block) on are queries, in the rows of q, out and lse from query_row on.
struct SequenceRows {
  int64_t keys = 0, first_query = 0;
  int64_t key_row = 0, query_row = 0;
};

struct BlockIndexShape {
  int block = 128;       // keys of a key block: 64, 128 or 256
  int query_block = 16;  // query tokens that share a list: 1 … 128
  int list_heads = 1;    // kv_heads (a list serves all query heads of the group) or heads (a list each)
  bool operator==(const BlockIndexShape&) const = default;
};

// One selected (query block, key block). Token t of the query block (counted from the block's first token) sees the key
// block if t >= first, and in it the keys that are not after t itself.
struct IndexEntry {
  uint16_t block;
  uint8_t first;
  bool operator==(const IndexEntry&) const = default;
};

// The pairs that block-sparse attention computes for one (layer, micro-batch): for every (sequence, list head, query
// block) a row of key blocks, ascending; and the transpose, for every (sequence, list head, key block) a column of
// query blocks, ascending. Blocks are counted from the start of their sequence. A dense sequence has neither: it is
// computed whole. A row may also hold single key tokens ("gathered columns", the verticals of vertical_slash).
class BlockIndex {
 public:
  struct Sequence {
    int32_t token_begin = 0, length = 0;
    bool dense = false;
    int32_t query_blocks = 0, key_blocks = 0;  // 0 when dense
    int64_t row_begin = 0, column_begin = 0;
    bool operator==(const Sequence&) const = default;
  };
  struct Row {
    std::span<const uint16_t> blocks;  // ascending
    std::span<const uint8_t> first;    // of blocks[i]
    std::span<const int32_t> columns;  // gathered key tokens, counted from the sequence's start, ascending, in none of
                                       // the blocks; seen by the tokens of the query block that are not before them
  };

  const BlockIndexShape& shape() const { return shape_; }
  std::span<const Sequence> sequences() const { return sequences_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  // What (list head, query block) of which sequence a row is.
  struct Place {
    const Sequence* sequence;
    int list_head, query_block;
  };
  Place place_of(int64_t row) const;
  static int64_t row_id(const Sequence& sequence, int list_head, int query_block) {
    return sequence.row_begin + int64_t{list_head} * sequence.query_blocks + query_block;
  }
  static int64_t column_id(const Sequence& sequence, int list_head, int key_block) {
    return sequence.column_begin + int64_t{list_head} * sequence.key_blocks + key_block;
  }
  // Tokens of query block `query_block` of a sequence (the last one may be short).
  int query_tokens(const Sequence& sequence, int query_block) const;

  Row row(int64_t id) const;
  // Query blocks that selected a key block, ascending; query_block_of and first_of take an entry apart.
  std::span<const uint32_t> column(int64_t id) const;
  static int query_block_of(uint32_t column_entry) { return static_cast<int>(column_entry >> 7); }
  static int first_of(uint32_t column_entry) { return static_cast<int>(column_entry & 127); }

  int64_t entries() const { return static_cast<int64_t>(row_blocks_.size()); }
  bool has_gathered_columns() const { return !gathered_.empty(); }
  // (query token, key token) pairs that are computed, summed over the list heads, dense sequences included; and how
  // many there would be if everything were dense.
  int64_t token_pairs() const;
  int64_t causal_token_pairs() const;
  // Bytes the lists hold now.
  int64_t bytes() const;

  // To a file and back, to replay the selections of a run. load() checks everything and throws UserError.
  void save(const std::string& path) const;
  void load(const std::string& path, ThreadPool& pool);

  // The same pairs in the same sequences.
  bool operator==(const BlockIndex& other) const;

 private:
  friend class BlockIndexBuilder;
  void lay_out(const BlockIndexShape& shape, std::span<const int32_t> cu_seqlens, std::span<const uint8_t> dense);
  void build_columns(ThreadPool& pool);
  int64_t row_token_pairs(const Sequence& sequence, int query_block, const Row& row) const;

  BlockIndexShape shape_;
  std::vector<Sequence> sequences_;
  int64_t rows_ = 0, columns_ = 0;
  std::vector<uint32_t> row_offsets_, gathered_offsets_;  // [rows + 1]
  std::vector<uint16_t> row_blocks_;
  std::vector<uint8_t> row_first_;
  std::vector<int32_t> gathered_;
  std::vector<uint32_t> column_offsets_;  // [columns + 1]
  std::vector<uint32_t> column_entries_;  // query block · 128 + first
};

// Fills an index from rows that come in any order from several threads; the result depends on the rows alone. Its
// buffers are reused: one builder serves all layers.
class BlockIndexBuilder {
 public:
  // Makes `index` empty: a row without entries for every (list head, query block) of the sequences that are not dense
  // (dense[i] != 0; an empty span: none is). set_row is then called with thread numbers below `threads`.
  void begin(BlockIndex& index, const BlockIndexShape& shape, std::span<const int32_t> cu_seqlens,
             std::span<const uint8_t> dense, int threads);
  // At most once a row (BlockIndex::row_id); rows left out stay empty. Entries ascending and causal, columns in none of
  // the blocks: InternalError otherwise. Different threads may call it at the same time.
  void set_row(int thread, int64_t row, std::span<const IndexEntry> entries, std::span<const int32_t> columns = {});
  // Puts the rows together and builds the columns, in parallel.
  void finish(ThreadPool& pool);

  // Memory it holds, and the most it ever does for so many rows with so many entries and columns in all.
  int64_t bytes() const;
  static int64_t most_bytes(int64_t rows, int64_t entries, int64_t columns, int threads);

 private:
  struct StagedRow {
    int32_t thread = -1;
    uint32_t entries = 0, columns = 0;
    int64_t entry_begin = 0, column_begin = 0;
  };
  void check_row(int64_t row, std::span<const IndexEntry> entries, std::span<const int32_t> columns) const;

  BlockIndex* index_ = nullptr;
  std::vector<StagedRow> staged_;
  StagedValues<IndexEntry> entries_;
  StagedValues<int32_t> columns_;
};

}  // namespace sb
