#pragma once

// Choosing key blocks on the device: the causal staircase of `topk` over estimated masses, straight into row and column
// lists, without atomics and without the host. How many blocks a tile lists follows from the budget alone, so the host
// lays out the lists before the run.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/hopper/params.h"
#include "attention/selection/tiles.h"

namespace sb::hopper {

// One query block of one key/value head.
struct alignas(16) SelectItem {
  int32_t token = 0;       // first token, in the packed tensors
  int32_t tokens = 0;      // of the query block
  int32_t head = 0;        // key/value head
  int32_t competing = 0;   // key blocks that end before the query block
  int32_t visible = 0;     // these and its own
  int32_t sinks = 0;       // always chosen: the first
  int32_t local = 0;       // and the last of the competing ones
  int32_t first = 0;       // choices of the first token, besides
  int32_t total = 0;       // of a whole query block
  int32_t statistics = 0;  // row of the sequence's first block under this head
  int32_t list_begin = 0;  // in the row entries
  int32_t everything = 0;  // no choice to make: all visible blocks
  int64_t map = 0;         // byte of (query block, key block 0) in the map
  int64_t unused = 0;
};

// One key block of one key/value head; those of dense sequences are there too, with no query blocks.
struct SelectColumn {
  int64_t map = 0;  // byte of (first query block that can see it, key block) in the map
  int32_t stride = 0;
  int32_t first_block = 0;  // that query block
  int32_t blocks = 0;       // query blocks from there to the end of the sequence
  int32_t unused = 0;
};

// A key block whose mean and variance are to be taken.
struct SelectBlock {
  int32_t token = 0, keys = 0, head = 0, unused = 0;
};

struct SelectPlan {
  int32_t query_block = 0;
  int32_t subtile_tokens = 0;
  int32_t max_competing = 0;
  int64_t map_bytes = 0;
  std::vector<SelectItem> items;  // in the order in which they are started
  std::vector<SelectBlock> blocks;
  std::vector<SelectColumn> columns;
  std::vector<int32_t> row_offsets;  // as in RowLists
  int32_t rows = 0;
  int32_t entries = 0;
};

// Sequences that run dense take no part. `tiles[s]` carries block, query_block, sinks, local blocks and budget of
// sequence s; `step` is what each later token of a query block may add.
SelectPlan make_select_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                            const std::vector<SequenceTiles>& tiles, int step);

// Longest sequence whose scores fit the shared memory, in key blocks.
constexpr int kMaxCompeting = 1216;

struct SelectParams {
  Shape shape;
  const void* q = nullptr;
  const void* k = nullptr;
  int32_t query_block = 0, subtile_tokens = 0, max_competing = 0;
  const SelectItem* items = nullptr;
  int32_t item_count = 0;
  const SelectBlock* blocks = nullptr;
  int32_t block_count = 0;
  const SelectColumn* columns = nullptr;
  int32_t column_count = 0;
  uint32_t* row_entries = nullptr;     // [entries]
  int32_t* column_offsets = nullptr;   // [columns + 1]
  uint32_t* column_entries = nullptr;  // [entries]
  // Workspace.
  void* statistics = nullptr;  // bf16 [block_count, 2 d]
  uint8_t* map = nullptr;      // [map_bytes]
};

void select(const SelectParams& params, void* stream);

}  // namespace sb::hopper
