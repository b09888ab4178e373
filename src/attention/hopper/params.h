#pragma once

// What the Hopper attention kernels are told: plain structs and raw device pointers.
//
// Tensors are packed: q, o [tokens, query_heads, d] and k, v [tokens, kv_heads, d] in bf16, log-sum-exp
// [tokens, query_heads] in fp32. Rows of a tile are (token, head of the group), head fastest. A subtile has 64 rows:
// `tokens` consecutive tokens of one sequence, counted from its start, times `heads` query heads; rows that are left
// over (64 is no multiple of 7) and tokens past the end of the sequence are padding. A tile of the forward is two
// subtiles. Key blocks have 128 tokens and are counted from the start of their sequence.

#include <cstddef>
#include <cstdint>

namespace sb::hopper {

constexpr int kBlock = 128;
constexpr int kSubtileRows = 64;

// One chosen (query block, key block): in a row list `id` is the key block, in a column list the query block; both
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
};

struct Tiling {
  int32_t heads = 0;        // query heads in a subtile: the whole group, or 1 when every query head has its own list
  int32_t tokens = 0;       // tokens in a subtile
  int32_t query_block = 0;  // tokens that share a list, a multiple of a tile
  int32_t subtiles = 0;     // of all sequences, for one list head; every sequence rounded up to whole tiles
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
};

// One key block of the backward or a part of its column.
struct alignas(16) BackwardItem {
  int32_t token = 0;     // first key, in the packed tensors
  int32_t keys = 0;      // 1..128
  int32_t position = 0;  // of the first key in its sequence
  int32_t head = 0;      // key/value head
  int32_t subtile = 0;   // the sequence's first subtile, for list head 0
  int32_t subtiles = 0;  // of the sequence
  int32_t segment_begin = 0;
  int32_t segment_count = 0;
  int32_t partial = -1;  // slot for an unfinished sum of a split column; -1: this item is the whole column
  int32_t dense = 0;     // segments count tiles of the sequence instead of list entries
  int32_t unused[2] = {0, 0};
};

struct ColumnSegment {
  int32_t head = 0;   // list head
  int32_t begin = 0;  // in the column entries; dense: the first tile
  int32_t count = 0;
};

// A key block whose column was split: dK and dV are the sum of the slots [begin, begin + count).
struct SplitColumn {
  int32_t token = 0, keys = 0, head = 0, begin = 0, count = 0;
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
  int32_t* counter = nullptr;  // one int of workspace
};

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
  const int32_t* cu_seqlens = nullptr;   // [sequences + 1]
  const int32_t* cu_subtiles = nullptr;  // [sequences + 1], for one list head
  int32_t sequences = 0;
  const BackwardItem* items = nullptr;
  int32_t item_count = 0;
  const ColumnSegment* segments = nullptr;
  const uint32_t* column_entries = nullptr;
  const SplitColumn* splits = nullptr;
  int32_t split_count = 0;
  // The deterministic backward walks the rows a second time.
  const ForwardItem* row_items = nullptr;
  int32_t row_item_count = 0;
  const uint32_t* row_entries = nullptr;
  // Workspace; sizes below.
  float* statistics = nullptr;
  float* dq_sum = nullptr;  // not needed when deterministic
  float* partials = nullptr;
  int32_t* counter = nullptr;  // two ints
};

// Floats of workspace: log-sum-exp and dO·O of every row, the fp32 sum of dQ, the slots of split columns.
size_t statistics_size(const Shape& shape, const Tiling& tiling);
size_t dq_sum_size(const Shape& shape, const Tiling& tiling);
size_t partials_size(const Shape& shape, int slots);

// All asynchronous on `stream` (a cudaStream_t); no host synchronisation, capturable into a graph.
void forward(const ForwardParams& params, void* stream);
void backward(const BackwardParams& params, void* stream);
// Bit-equal over runs: dK/dV and dQ in two kernels without concurrent sums.
void backward_deterministic(const BackwardParams& params, void* stream);

}  // namespace sb::hopper
