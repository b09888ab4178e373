#pragma once

#include <algorithm>
#include <vector>

#include "attention/cpu/tile_kernels.h"
#include "attention/cpu/walk.h"

namespace sb {

// Rows of a tile: at most this, unless one token alone has more heads.
constexpr int kTileRows = 128;

// How one sequence is cut into query tiles and key tiles. The rows of a query tile are (token, head of the list), and
// all of them walk the same list of key blocks.
struct SequenceWalk {
  int64_t length = 0;  // all tokens, keys and queries
  SequenceRows rows;
  std::span<const KeyPage> pages;                // of a piece: where its keys lie; empty: one after the other
  const BlockIndex::Sequence* listed = nullptr;  // null: dense
  int list_heads = 0;
  int row_heads = 0;      // query heads of a list
  int query_block = 0;    // tokens of a list
  int tiles_a_block = 0;  // a query block with more rows than a tile holds is cut further
  int tile_tokens = 0;
  int key_tile = 0;  // keys of a key tile
  int tiles_a_key_block = 0;

  int64_t queries() const { return length - rows.first_query; }
  // The query block that the first query is in; a dense piece may begin in the middle of it.
  int64_t first_block() const { return rows.first_query / query_block; }
  int64_t first_tile() const { return first_block() * tiles_a_block; }
  int64_t query_tiles() const { return ((length + query_block - 1) / query_block - first_block()) * tiles_a_block; }
  int64_t key_tiles() const { return (rows.keys + key_tile - 1) / key_tile; }
  // Rows of the operands.
  int64_t query_row(int64_t token) const { return rows.query_row + token - rows.first_query; }
  int64_t key_row(int64_t key) const { return rows.key_row + key; }
  // Where the keys from `key` on lie one after the other, and how many of them.
  struct KeyRun {
    int64_t row, count;
  };
  KeyRun key_run(int64_t key) const;
};

struct QueryTile {
  int64_t begin, end;  // tokens of the sequence; none when begin >= end
  int block;           // its query block
  int offset;          // of its first token in the query block
};
QueryTile query_tile(const SequenceWalk& walk, int64_t tile);

// Walks of the sequences that are not empty, longest first. `rows` empty: queries and keys are the same tokens.
std::vector<SequenceWalk> plan_walks(const AttentionShape& shape, const PackedSequences& sequences,
                                     const BlockIndex* index, std::span<const SequenceRows> rows);

// The rows of a query tile that see keys [key, key + keys), and how many each sees.
struct Visibility {
  int row_begin;           // rows before it see nothing; the number of rows: nobody sees anything
  const int32_t* visible;  // null: all rows from row_begin on see all keys
};
// `first`: the first token of the query block that may look at all. Fills `buffer` (one number a row) where needed.
Visibility visibility(const SequenceWalk& walk, const QueryTile& tile, int first, int64_t key, int keys,
                      int32_t* buffer);

// Where the repacked keys or values of a (sequence, kv head) lie: one after the other, in any of the packed forms.
class PackedKeys {
 public:
  PackedKeys(const AttentionShape& shape, int64_t tokens)
      : padded_(padded_depth(shape.head_dim)), kv_heads_(shape.kv_heads), tokens_(tokens) {}
  int64_t floats() const { return tokens_ * kv_heads_ * padded_ + kPanelSlack; }
  int64_t offset(const SequenceWalk& walk, int kv_head, int64_t key) const {
    return ((walk.rows.key_row * kv_heads_ + kv_head * walk.rows.keys) + key) * padded_;
  }

 private:
  int padded_, kv_heads_;
  int64_t tokens_;
};

enum class PackedForm { panels, rows };
struct PackRequest {
  const float* source;  // [T, kv_heads, d]
  float* target;
  PackedForm form;
};
void pack_keys(ThreadPool& pool, const TileKernels& kernels, const AttentionShape& shape,
               const std::vector<SequenceWalk>& walks, const PackedKeys& packed, std::span<const PackRequest> requests);

// Cuts [0, counts[0]), [0, counts[1]) … laid end to end: which one a flat number falls into.
class FlatTasks {
 public:
  void add(int64_t count) { ends_.push_back((ends_.empty() ? 0 : ends_.back()) + count); }
  int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }
  struct Task {
    size_t part;
    int64_t number;
  };
  Task at(int64_t flat) const {
    const size_t part = std::upper_bound(ends_.begin(), ends_.end(), flat) - ends_.begin();
    return {part, flat - (part == 0 ? 0 : ends_[part - 1])};
  }

 private:
  std::vector<int64_t> ends_;
};

void check_operands(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                    const AttentionOperands& operands, const BlockIndex* index, std::span<const SequenceRows> rows);

}  // namespace sb
