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
  int64_t whole = 0;   // queries of the sequence, of a piece those of all its pieces
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
  // Keys [begin, begin + keys), which lie in the rows from `row` on; those of a whole sequence are one page.
  struct Page {
    int64_t begin, row, keys;
  };
  Page page_of(int64_t key) const;
  Page last_page() const { return page_of(rows.keys - 1); }
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

// The forms in which the kernels read keys and values.
enum class PackedForm { k_panels, v_panels, k_rows, v_rows };
constexpr PackedForm kForwardForms[] = {PackedForm::k_panels, PackedForm::v_rows};
constexpr PackedForm kBackwardForms[] = {PackedForm::k_panels, PackedForm::v_panels, PackedForm::k_rows};
// Of the pages of pieces, which both directions read. Behind the panels come rows enough for kPanelSlack.
constexpr PackedForm kPageForms[] = {PackedForm::k_panels, PackedForm::v_panels, PackedForm::k_rows,
                                     PackedForm::v_rows};
static_assert(2 * kDepthUnit >= kPanelSlack);

// Packed keys and values. The memory of a page begins at its first row; in it lies form after form, of each head after
// head.
class PackedKeys {
 public:
  PackedKeys(const AttentionShape& shape, std::span<const PackedForm> forms, float* memory)
      : forms_(forms), memory_(memory), head_floats_(padded_depth(shape.head_dim)), kv_heads_(shape.kv_heads) {}
  static int64_t row_floats(const AttentionShape& shape, std::span<const PackedForm> forms) {
    return std::ssize(forms) * shape.kv_heads * padded_depth(shape.head_dim);
  }
  // Of so many rows that are not those of pieces.
  static int64_t floats(const AttentionShape& shape, std::span<const PackedForm> forms, int64_t rows) {
    return rows * row_floats(shape, forms) + kPanelSlack;
  }

  std::span<const PackedForm> forms() const { return forms_; }
  // `key` is counted from the page's first one.
  float* at(PackedForm form, const SequenceWalk::Page& page, int kv_head, int64_t key) const {
    const auto place = std::find(forms_.begin(), forms_.end(), form) - forms_.begin();
    return memory_ +
           (page.row * std::ssize(forms_) * kv_heads_ + (place * kv_heads_ + kv_head) * page.keys + key) * head_floats_;
  }
  // Keys [key, key + keys) of a sequence: where they lie, or put together in `buffer` from several pages.
  const float* tile(PackedForm form, const SequenceWalk& walk, int kv_head, int64_t key, int keys, float* buffer) const;

 private:
  std::span<const PackedForm> forms_;
  float* memory_;
  int head_floats_, kv_heads_;
};

// Where to pack: of pieces, beside their pages; otherwise these forms in scratch memory.
PackedKeys packed_keys(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                       const AttentionOperands& operands, std::span<const PackedForm> forms);
// Packs every walk's last page: all of a whole sequence, of a piece its own keys and values.
void pack_keys(ThreadPool& pool, const TileKernels& kernels, const AttentionShape& shape,
               const std::vector<SequenceWalk>& walks, const AttentionOperands& operands, const PackedKeys& packed);

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
