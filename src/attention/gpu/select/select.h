#pragma once

// Selecting key blocks on the device, straight into row and column lists, without atomics on the lists and without the
// host: statistics of the key blocks, estimated masses of every (token, key block), selections of every query block,
// and the transpose. How many blocks a query block may list follows from the budget alone, so the host lays out the
// lists before the run; what a query block does not use is filled with entries that no kernel follows.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/gpu/launch/params.h"
#include "attention/select/block_statistics.h"
#include "attention/select/learned_selection.h"
#include "attention/select/selection_config.h"
#include "attention/select/tiles.h"

namespace sb::gpu {

constexpr uint32_t kNoEntry = 0xFFFFFFFFu;

// How tokens are scored: so many at a time, the query heads of a group in so many equal parts ("slices", whose masses
// lie apart: of a block the largest counts).
struct ScoreTile {
  int tokens = 0, slices = 1;
  bool joins = false;  // tokens with different key blocks to select among, as long as they end in the same 64
  // Score `planes`: channels that a key has for the kernel, zeros behind those that count (0: only these), and keys
  // that share a row of the statistics.
  int plane_depth = 0, row_keys = 1;
};

// Tokens of one key/value head that select among the same key blocks, or up to different ones of the same 64. Masses of
// the i-th are at masses + i · stride.
struct alignas(16) ScoreItem {
  int32_t token = 0;  // first, in the packed tensors
  int32_t tokens = 0;
  int32_t head = 0;        // key/value head · slices + slice
  int32_t competing = 0;   // key blocks that end before the query block of the last token
  int32_t statistics = 0;  // first row of the sequence's blocks under this head
  int32_t stride = 0;      // `competing` in whole 64s
  int64_t masses = 0;
};
// One of its tokens. What an item has fewer than it may have repeats the first.
struct ScoreToken {
  uint16_t later = 0;  // how far it is behind the first
  uint16_t left = 0;   // its key blocks among the last 64
};

// One query block of one key/value head. Counts of key blocks are in those of the selection, `visible` and the lists in
// those of the kernels (Tiling::block), of which a block of the selection may hold two.
struct alignas(16) SelectItem {
  int32_t tokens = 0;
  int32_t position = 0;    // of the first token in its sequence
  int32_t competing = 0;   // key blocks that end before the query block
  int32_t visible = 0;     // these and its own
  int32_t sinks = 0;       // always selected: the first
  int32_t local = 0;       // and the last of the competing ones
  int32_t first = 0;       // the most the first token may select, besides
  int32_t total = 0;       // and the whole query block
  int32_t list_begin = 0;  // in the row entries
  int32_t capacity = 0;
  int32_t everything = 0;  // no selection to make: all visible blocks
  int32_t sequence = 0;
  int64_t masses = 0;  // of its first token that selects
  int64_t map = 0;     // byte of (query block, key block 0) in the map
  int32_t stride = 0;  // of the masses
  int32_t pool = 0;    // SelectPool it belongs to; `vertical_slash`: GatheredList
  int64_t sums = 0;    // `mass` with look-ahead: its own masses
};

// What the tokens of a query block up to `row` may have selected together.
constexpr int allowed_until(int first, int total, int query_block, int row) {
  return query_block <= 1 ? total : first + (total - first) * row / (query_block - 1);
}
// The same token by token, without divisions.
struct Allowance {
  int allowed, each, rest, wrap, carry = 0;
  bool grew = true;  // whether this token may add to what the one before it might have selected
  constexpr Allowance(int first, int total, int query_block)
      : allowed(query_block <= 1 ? total : first),
        each(query_block <= 1 ? 0 : (total - first) / (query_block - 1)),
        rest(query_block <= 1 ? 0 : (total - first) % (query_block - 1)),
        wrap(query_block - 1) {
    grew = allowed > 0;
  }
  constexpr void next() {
    const int before = allowed;
    allowed += each;
    carry += rest;
    if (carry >= wrap && wrap > 0) {
      carry -= wrap;
      ++allowed;
    }
    grew = allowed > before;
  }
};

// Up to eight neighbouring key blocks of one sequence and key/value head; those of dense sequences are there too, with
// no query blocks.
constexpr int kGroupColumns = 8;
struct SelectGroup {
  int64_t map = 0;  // byte of (query block 0, first of the key blocks) in the map
  int32_t stride = 0;
  int32_t column = 0, columns = 0;  // numbers of the key blocks among all
  int32_t key_block = 0;            // number of the first in its sequence; of a piece, counted from its own first
  int32_t first_block = 0;          // first query block that can see it, likewise
  int32_t query_blocks = 0;         // from there to the end of the sequence
  int32_t block = 0, query_block = 0;
};

// `mass` with look-ahead: the query blocks of one sequence and head, which share their selections.
struct SelectPool {
  int64_t wanted = 0;      // selections besides the forced ones
  int32_t first_tile = 0;  // of its query blocks among those of all pools
  int32_t tiles = 0;
};

// A key block whose mean and variance are to be taken, of the whole or of each of its parts. Statistics of part p are
// in row `row` + 64 · p: rows of 64 neighbouring blocks lie together, part by part, so that a tile of 64 rows is the
// same part of 64 blocks. With the score `planes` a part is one key or a few in a row, of which the channels that count
// are kept.
struct SelectBlock {
  int32_t token = 0, keys = 0, head = 0, row = 0;
};
constexpr int kStatisticsGroup = 64;
// The row of the first part of a block, among those of its sequence, and the rows of so many blocks.
constexpr int64_t statistics_row(int64_t b, int parts) {
  return b / kStatisticsGroup * kStatisticsGroup * parts + b % kStatisticsGroup;
}
constexpr int64_t statistics_rows(int64_t blocks, int parts) {
  return parts == 1 ? blocks : (blocks + kStatisticsGroup - 1) / kStatisticsGroup * kStatisticsGroup * parts;
}

// Masses of all tokens at once would not fit: the tokens are worked off in batches, each within its own part of the
// items.
struct SelectBatch {
  int32_t score_begin = 0, score_count = 0, item_begin = 0, item_count = 0;
};

// A sequence of a plan, and how many blocks its query blocks here list anyhow and want besides, over the list heads; 0
// where it takes no part.
struct SelectSequence {
  SequenceTiles tiles;
  int64_t given = 0, wanted = 0;
};

struct SelectPlan {
  int32_t list_heads = 0;
  int32_t query_block = 0;
  int32_t select_block = 0;  // tokens of a key block in the selection
  int32_t block = 0;         // and in the lists
  int32_t slices = 1;
  int32_t parts = 1;       // of a key block that are judged each by itself
  int32_t statistics = 2;  // numbers kept of every channel of a part: mean and, where it is needed, variance
  int32_t row_width = 0;   // numbers of a row of statistics
  int32_t plane_depth = 0, row_keys = 1;  // as in ScoreTile; depth 0: blocks are not judged by planes
  int32_t statistics_rows = 0;
  int32_t max_competing = 0;  // of the query blocks that select
  int64_t masses = 0;         // 16-bit masses of the largest batch, of one slice
  int64_t map_bytes = 0;
  std::vector<ScoreItem> scores;       // of every batch in the order in which they are started
  int32_t score_tokens = 0;            // that an item may have
  std::vector<ScoreToken> score_rows;  // [score item][score_tokens]
  std::vector<SelectItem> items;
  std::vector<SelectBatch> batches;
  std::vector<SelectBlock> blocks;
  std::vector<SelectGroup> groups;
  std::vector<SelectPool> pools;
  std::vector<SelectSequence> sequences;
  std::vector<int32_t> mass_classes;  // of the sequences, where thresholds are learned; else zeros
  int64_t sums = 0;                   // masses of query blocks
  int32_t pool_tiles = 0;
  int32_t columns = 0;               // key blocks of all sequences and heads
  std::vector<int32_t> row_offsets;  // as in RowLayout
  int32_t rows = 0;
  int32_t entries = 0;
  int64_t token_pairs = 0;  // (query, key) pairs over the list heads, if every query block uses all it may
};

// Where several ranks share the sequences, each plans for the query blocks it holds, over the key blocks of all: score
// items count on the statistics of whole sequences, `blocks` are those that lie here, with rows among themselves. There
// are no groups then, since columns belong to the rank that has the keys.
struct HeldBlocks {
  std::vector<std::span<const int32_t>> blocks;  // of every sequence those that lie here, ascending
};

// Sequences that run dense take no part. `tiles[s]` carries block, query_block, sinks, local blocks and budget of
// sequence s; a score item has at most `score.tokens` tokens, a batch at most `batch_masses` masses (and at least one
// query block). With `held`, cu_seqlens counts the tokens that lie here.
// With `piece`, the only sequence is a piece of the one that `tiles` is about, from shape.first_query on: `blocks` are
// its own, with rows among those of the whole sequence, and columns are those of all keys up to its end.
SelectPlan make_select_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                            const std::vector<SequenceTiles>& tiles, const SelectionConfig& config,
                            const ScoreTile& score, int64_t batch_masses, const HeldBlocks* held = nullptr,
                            bool piece = false);

// Channels that a key has for the Hopper kernels where blocks are judged by planes.
inline int hopper_plane_depth(const SelectionConfig& config) {
  return config.score_channels <= 32 ? 32 : config.score_channels <= 64 ? 64 : 128;
}

struct SelectParams {
  Shape shape;
  const void* q = nullptr;
  const void* k = nullptr;
  // What the configuration says.
  SelectionPattern pattern = SelectionPattern::topk;
  bool lookahead = false;
  bool moments = true;
  float coverage = 1;
  // Score `planes`, of the layer at hand and in device memory: channels [kv_heads, plane_channels], scales [kv_heads],
  // means of keys [kv_heads, plane_channels].
  const int32_t* planes = nullptr;
  const float* plane_scales = nullptr;
  const float* plane_key_means = nullptr;
  int32_t plane_channels = 0;
  const float* thresholds = nullptr;  // `mass`: of every sequence
  int32_t shared_memory = 0;          // of a thread block that selects, at most; 0: what the device has
  // The plan, arrays in device memory.
  int32_t query_block = 0, select_block = 0, block = 0, max_competing = 0;
  int32_t slices = 1, parts = 1, statistics_channels = 2, statistics_rows = 0, row_width = 0;
  int32_t plane_depth = 0, row_keys = 1;
  int64_t slice_masses = 0;  // from one slice to the next
  const ScoreItem* scores = nullptr;
  const ScoreToken* score_rows = nullptr;  // [score item][plan.score_tokens]
  const SelectItem* items = nullptr;
  std::span<const SelectBatch> batches;  // host memory
  const SelectBlock* blocks = nullptr;
  int32_t block_count = 0;
  const SelectGroup* groups = nullptr;
  int32_t group_count = 0, column_count = 0;
  uint32_t* row_entries = nullptr;     // [entries]
  int32_t* column_offsets = nullptr;   // [columns + 1]
  uint32_t* column_entries = nullptr;  // [entries]
  const SelectPool* pools = nullptr;
  int32_t pool_count = 0, pool_tiles = 0;
  // Sum of what was selected, forced blocks included: [sequence][blocks, (query, key) pairs]; null: not counted.
  unsigned long long* selected = nullptr;
  // Workspace.
  void* statistics = nullptr;  // statistics_bytes()
  bool statistics_given = false;
  void* room = nullptr;  // of the Hopper kernels, where it does not lie behind the statistics
  // [plan.slices · plan.masses]: log2 as 16-bit floats, mapped so that they order as unsigned integers. Of very long
  // sequences, selecting overwrites them.
  uint16_t* masses = nullptr;
  uint8_t* map = nullptr;            // [plan.map_bytes]
  int32_t* column_counts = nullptr;  // [columns]
  uint16_t* sums = nullptr;          // [plan.sums], like the masses
  int32_t* pool_counts = nullptr;    // [pool_counts_size()]

  bool most_mass() const { return pattern == SelectionPattern::mass && lookahead; }
};

// What a plan says but for its arrays, which lie in device memory.
void set_plan(const SelectPlan& plan, SelectParams& params);

// Of each pool two histograms, of each query block one number.
constexpr int64_t pool_counts_size(int64_t pools, int64_t pool_tiles) {
  return pools * 512 + pool_tiles;
}

// Classes in which thresholds are learned (mass_key()), numbered.
constexpr int kMassClasses = 32 * 64;
int mass_class(const MassKey& key);

// Tokens whose queries and keys are sampled for the energies of planes.
std::vector<int32_t> plane_samples(std::span<const int32_t> cu_seqlens);

// Statistics and, of the Hopper kernels, the room behind them.
int64_t hopper_statistics_bytes(const Shape& shape, const SelectPlan& plan);
int64_t hopper_kept_bytes(const SelectPlan& plan);
int64_t hopper_room_bytes(const Shape& shape, const SelectPlan& plan);
int64_t portable_statistics_bytes(const Shape& shape, const SelectPlan& plan);
ScoreTile hopper_score_tile(const Shape& shape, const SelectionConfig& config);
constexpr ScoreTile kPortableScoreTile{16, 1};

// Row lists and map.
void hopper_select(const SelectParams& params, void* stream);
void portable_select(const SelectParams& params, Precision precision, void* stream);
// Column lists from the map, when the row lists are done. Only the backward needs them: this may run beside the
// forward.
void list_columns(const SelectParams& params, void* stream);

// For ranks that share sequences: the statistics (with the score `planes`: the channels that count) of `blocks` alone.
// With those of all ranks in `statistics`, and `statistics_given`, the functions above select by them.
void hopper_block_statistics(const SelectParams& params, void* stream);
void portable_block_statistics(const SelectParams& params, Precision precision, void* stream);

}  // namespace sb::gpu
