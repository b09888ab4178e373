#pragma once

// What the attention kernels are told: plain structs and raw device pointers. Key blocks have 64 or 128 tokens. The
// Hopper kernels take bf16, the portable ones bf16 or fp32.
//
// Tensors are packed: q, o [tokens, query_heads, d] and k, v [tokens, kv_heads, d], log-sum-exp [query_heads, tokens]
// in fp32. Rows of a tile are (token, head of the group), head fastest. A subtile has 64 rows: `tokens` consecutive
// tokens of one sequence, counted from its start, times `heads` query heads; rows that are left over (64 is no multiple
// of 7) and tokens past the end of the sequence are padding. A tile of the forward is two subtiles (one where a query
// block has an odd number of tokens). Key blocks are counted from the start of their sequence.
//
// Lists may also hold single keys ("gathered columns"): of every sequence and list head one ascending list of key
// tokens, and of every query block a bit for each of them. They are part of the same softmax. The Hopper kernels read
// them from copies of their rows, 128 one after the other like the keys of a block.

#include <cstddef>
#include <cstdint>

namespace sb::gpu {

constexpr int kBlock = 128;
constexpr int kSubtileRows = 64;

// One selected (query block, key block): in a row list `id` is the key block, in a column list the query block; both
// count from the start of the sequence. `first` is the first token of the query block that sees the key block.
constexpr uint32_t list_entry(uint32_t id, uint32_t first) {
  return id | (first << 24);
}
constexpr uint32_t entry_id(uint32_t entry) {
  return entry & 0xFFFFFFu;
}
constexpr uint32_t entry_first(uint32_t entry) {
  return entry >> 24;
}

struct Shape {
  int64_t tokens = 0;
  int32_t query_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float scale = 0;  // of the products q·k
  // Of a piece of a sequence: the position of its first query. Its keys are those of the sequence from the first to the
  // piece's last: row 0 of k and v is position 0, row 0 of q is position first_query. Otherwise queries and keys are
  // the same tokens.
  int32_t first_query = 0;
  constexpr int64_t keys() const { return first_query + tokens; }
};

struct Tiling {
  int32_t heads = 0;        // query heads in a subtile: the whole group, or 1 when every query head has its own list;
                            // a part of the group where that has more than 64
  int32_t tokens = 0;       // tokens in a subtile
  int32_t query_block = 0;  // tokens that share a list, a multiple of a tile
  int32_t subtiles = 0;     // of all sequences, for one list head; every sequence rounded up to whole tiles
  int32_t block = kBlock;   // tokens of a key block
  int32_t keys = kBlock;    // of an item of the backward: a block, or two of 64 (Hopper)
  int32_t tile = 2;         // subtiles of a tile
  int32_t parts = 1;        // parts of a group that share a list; a "list head" below is one of them
};

// One tile of the forward (and of the query-stationary backward), in the order in which they are started.
struct alignas(16) ForwardItem {
  int32_t token = 0;       // first token, in the packed tensors
  int32_t tokens = 0;      // that are no padding
  int32_t position = 0;    // of the first token in its sequence
  int32_t head = 0;        // list head
  int32_t list_begin = 0;  // in the row entries; -1: all key blocks
  int32_t list_count = 0;
  int32_t query_token = 0;  // of the first token in its query block
  int32_t subtile = 0;      // first subtile among all of all list heads
  int32_t gathered = -1;    // its GatheredList; -1: no single keys
  int32_t unused[3] = {0, 0, 0};
};

// One key block of the backward (or two of 64 tokens), or a part of its column. A column is what all list heads of the
// key/value head selected it with, one list head after the other: entries; tiles of the sequence where that is dense;
// all query blocks from its own on where there are two.
struct alignas(16) BackwardItem {
  int32_t token = 0;     // first key, in the packed tensors
  int32_t keys = 0;      // 1..Tiling::keys
  int32_t position = 0;  // of the first key in its sequence
  int32_t head = 0;      // key/value head
  int32_t subtile = 0;   // the first subtile of the sequence's queries, for list head 0
  int32_t subtiles = 0;  // of these queries
  int32_t column = 0;    // number of the key block (the first of two) among those of one list head
  int32_t dense = 0;
  int32_t begin = 0, count = 0;  // the part of the column
  int32_t partial = -1;          // slot for an unfinished sum of a split column; -1: this item is the whole column
  int32_t gathered = -1;         // the sequence's first GatheredList; -1: no single keys
};

// A key block whose column was split: dK and dV are the sum of the slots [begin, begin + count).
struct SplitColumn {
  int32_t token = 0, keys = 0, head = 0, begin = 0, count = 0;
  int32_t position = 0, gathered = -1;  // as in BackwardItem
};

// The gathered columns of one sequence and list head, in an even number of pieces of 64: the last are padded with
// kNoColumn.
constexpr int32_t kNoColumn = INT32_MAX;
constexpr int kGatheredPiece = 64;
struct GatheredList {
  int64_t columns = 0;  // first in the array of columns
  int64_t bits = 0;     // first 64-bit word of query block 0; `pieces` words per query block
  int32_t pieces = 0;
  int32_t slot = 0;   // of piece 0 among all pieces: where the sums of its gradients go
  int32_t token = 0;  // the sequence's first, in the packed tensors
  int32_t tokens = 0;
  int32_t head = 0;     // list head
  int32_t subtile = 0;  // the sequence's first subtile, for list head 0
  int32_t rows = 0;     // query blocks
  int32_t place = 0;    // first GatheredPlace of its key blocks
};
struct GatheredColumns {
  const GatheredList* lists = nullptr;  // [sequence][list head]; null: none
  int32_t list_heads = 0;
  const int32_t* pieces = nullptr;  // of every piece its list
  int32_t piece_count = 0;
  const int32_t* columns = nullptr;
  const uint64_t* bits = nullptr;
  int32_t list_count = 0, place_count = 0;
};
// Of kBlock keys of one list: which of them are columns, and the place of the first of those among all columns.
struct alignas(16) GatheredPlace {
  uint32_t bits[kBlock / 32] = {};
  int32_t first = 0;
  int32_t unused[3] = {0, 0, 0};
};
// Workspace of the Hopper kernels: K and V at the columns, [columns of all lists, d].
struct GatheredRows {
  void* k = nullptr;
  void* v = nullptr;
};

// How many there are, written by the kernel that makes them.
struct WorkCounts {
  int32_t items = 0, splits = 0;
};

// How many there may be.
struct WorkLimits {
  int32_t items = 0, splits = 0, slots = 0;
};

struct ForwardParams {
  Shape shape;
  Tiling tiling;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;
  float* lse = nullptr;
  const ForwardItem* items = nullptr;
  int32_t item_count = 0;
  const uint32_t* row_entries = nullptr;
  GatheredColumns gathered;
  GatheredRows gathered_rows;
  int32_t* counter = nullptr;  // one int of workspace
};

// Of items of the keys and tiles of rows that are taken, and of warpgroups that have summed gathered columns.
enum BackwardCounter { kKeysTaken, kRowsTaken, kGatheredDone, kBackwardCounters };

struct BackwardParams {
  Shape shape;
  Tiling tiling;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* o = nullptr;
  const float* lse = nullptr;
  const void* d_o = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  bool adds = false;                     // dk and dv are fp32 and added to
  const int32_t* cu_seqlens = nullptr;   // [sequences + 1]
  const int32_t* cu_subtiles = nullptr;  // [sequences + 1], for one list head
  int32_t sequences = 0;
  const BackwardItem* items = nullptr;
  const SplitColumn* splits = nullptr;
  const WorkCounts* counts = nullptr;  // of both
  WorkLimits limits;
  const int32_t* column_offsets = nullptr;  // [list heads · columns + 1]
  const uint32_t* column_entries = nullptr;
  int32_t columns = 0;  // key blocks of all sequences
  // The deterministic backward walks the rows a second time.
  const ForwardItem* row_items = nullptr;
  int32_t row_item_count = 0;
  const uint32_t* row_entries = nullptr;
  GatheredColumns gathered;
  // Workspace; sizes below.
  float* statistics = nullptr;
  float* dq_sum = nullptr;  // not needed when deterministic
  float* partials = nullptr;
  float* gathered_sums = nullptr;  // [piece][dK, dV][64][d]; Hopper: [two pieces][part][dK, dV][kBlock · d]
  GatheredRows gathered_rows;
  GatheredPlace* gathered_places = nullptr;  // Hopper
  int32_t gathered_parts = 1;                // Hopper: parts in which the query blocks of a list are walked
  int32_t* counter = nullptr;                // kBackwardCounters
};

// Floats of workspace: log-sum-exp and dO·O of every row, the fp32 sum of dQ (of both also a subtile before and one
// behind, for the Hopper kernels and odd query blocks), the slots of split columns.
size_t statistics_size(const Shape& shape, const Tiling& tiling);
size_t dq_sum_size(const Shape& shape, const Tiling& tiling);
size_t partials_size(const Shape& shape, int slots);
size_t gathered_sums_size(const Shape& shape, int pieces, int parts = 1);
// Parts enough for all workers to share the walks of so many pieces.
constexpr int gathered_parts(int pieces, int workers) {
  const int items = pieces / 2 < 1 ? 1 : pieces / 2, parts = (3 * workers + items - 1) / items;
  return parts < 16 ? parts : 16;
}

// The order of the backward's work, made on the device from the column lists.
struct BackwardWorkParams {
  Shape shape;
  Tiling tiling;
  const BackwardItem* places = nullptr;  // [kv heads][head_places]: keys of every item, begin and count left out
  int32_t head_places = 0;
  const int32_t* column_offsets = nullptr;  // null when all sequences are dense
  int32_t columns = 0;
  int32_t workers = 0;      // that share the work: a column longer than a fair share is split
  bool leaves_out = false;  // key blocks that no query sees: their gradients are added to
  BackwardItem* items = nullptr;
  SplitColumn* splits = nullptr;
  WorkCounts* counts = nullptr;
};

// The most items, splits and slots that `columns` key blocks with altogether at most `cost` subtiles can need.
WorkLimits work_limits(int64_t columns, int64_t cost, int workers);
// The fewest subtiles for which a column is cut. With d = 128 and few pairs, as in pieces of sequences, a second kernel
// fills what long columns leave idle, and cutting them costs more than it saves (measured).
constexpr int64_t kLeastShare = 64;
constexpr int64_t least_share(int head_dim) {
  return head_dim <= 64 ? kLeastShare : 2 * kLeastShare;
}
// Subtiles in one fair share: a worker takes two. Where there are few columns and most are cut, equal parts leave
// workers idle at the end: those of the last head are cut finer.
constexpr int64_t fair_share(int64_t cost, int workers, int64_t columns, bool last_head, int64_t least) {
  const int64_t parts = (last_head && columns <= 2 * workers ? 3 : 2) * int64_t{workers};
  const int64_t share = (cost + parts - 1) / parts;
  return share < least ? least : share;
}

// All asynchronous on `stream` (a cudaStream_t); no host synchronisation, capturable into a graph.
void make_backward_work(const BackwardWorkParams& params, void* stream);
void hopper_forward(const ForwardParams& params, void* stream);
void hopper_backward(const BackwardParams& params, void* stream);
// Bit-equal over runs: dK/dV and dQ in two kernels without concurrent sums.
void hopper_backward_deterministic(const BackwardParams& params, void* stream);

// What a backward goes through, over the list heads.
struct BackwardPairs {
  int64_t entries = 0;  // of the row lists
  int64_t words = 0;    // of 64 gathered columns each, of which half come before a query block
  int64_t dense = 0;    // pairs (query, key) of sequences without lists
  int64_t causal = 0;   // pairs, were all sequences dense
};

// Which of the two is quicker: where a query sees few keys, or few of those before it, the sums of dQ in memory cost
// more than computing the scores twice (measured, docs/results/hopper-kernels.md).
constexpr bool quicker_in_two_kernels(const Shape& shape, const Tiling& tiling, const BackwardPairs& pairs) {
  const bool listed = pairs.entries > 0, gathered = pairs.words > 0;
  // Where two key blocks of 64 go together, one of two kernels has nothing to do for keys that are not seen.
  if (tiling.block < kBlock && listed) return true;
  const double keys =
      static_cast<double>(pairs.entries) * tiling.block + static_cast<double>(pairs.words) * kGatheredPiece / 2;
  const double selected = keys * tiling.query_block + static_cast<double>(pairs.dense);
  const double queries = static_cast<double>(shape.tokens) * (shape.query_heads / (tiling.heads * tiling.parts));
  // Larger query blocks spread the columns that run beside each other wider: less of dQ stays in the L2. Gathered
  // columns run one after the other.
  const double few = listed && !gathered && tiling.query_block >= 128 ? 4096 : 1024;
  const double share = gathered ? 0.07 : 0.11;
  return shape.head_dim == 128 &&
         (selected <= few * queries || (listed && selected <= share * static_cast<double>(pairs.causal)));
}

// For any GPU with bf16 tensor cores (SM80 and later), and in fp32 with plain arithmetic for exact comparison. The
// backward is the deterministic one: it sums nothing concurrently.
enum class Precision { bf16, fp32 };
void portable_forward(const ForwardParams& params, Precision precision, void* stream);
void portable_backward(const BackwardParams& params, Precision precision, void* stream);

}  // namespace sb::gpu
