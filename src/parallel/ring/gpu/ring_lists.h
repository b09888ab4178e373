#pragma once

// Lists of a ring on the device, without the host: from the rows that were selected, of all key blocks, to the
// rows and columns of every pass. What of it does not depend on the selections is planned on the host, as plain data.
//
// A row keeps its place: its entries are only ordered by pass, so that the row of pass c is the part of it from
// pass_begin[row][c] to pass_begin[row][c + 1]. Columns of all passes lie one after the other, pass by pass.

#include <cstdint>
#include <vector>

#include "attention/gpu/plan/work.h"
#include "attention/gpu/select/select.h"
#include "parallel/ring/ring_plan.h"

namespace sb::gpu {

// A (list head, query block) of this rank.
struct RingRow {
  int64_t map = 0;  // first byte of its line in the map
  int32_t list_begin = 0, capacity = 0;
  int32_t block = 0;    // first RingBlock of its sequence
  int32_t visible = 0;  // key blocks it can see
};

// A key block of a sequence, as this rank meets it.
struct RingBlock {
  int32_t pass = 0;
  int32_t place = 0;        // number in the made-up sequence
  int32_t column = -1;      // of list head 0 among the columns of all passes; -1: no query here sees it
  int32_t query_block = 0;  // number in the made-up sequence of this rank's first query block
};

// Up to kGroupColumns neighbouring key blocks of one sequence, under one list head.
struct RingGroup {
  int32_t row = 0, rows = 0;  // the rows that may see them
  int32_t block = 0;          // first RingBlock
  int32_t first = 0;          // its number in its sequence
  int32_t blocks = 0;
  int32_t head = 0;
  int32_t column = 0;  // of the first, among those of the selection
};

// One call of the kernels.
struct RingPassPlan {
  std::vector<int32_t> keys, queries;  // of every token of the made-up sequences the row it comes from; -1: none
  std::vector<int32_t> cu_seqlens;
  Work work;                 // forward: of the queries alone, list_begin is the number of the row
  int32_t first_column = 0;  // among those of all passes; work.columns of every list head
  int64_t tokens() const { return static_cast<int64_t>(keys.size()); }
};

struct RingListPlan {
  SelectPlan select;  // of the query blocks of this rank; masses and selections over all key blocks
  std::vector<RingRow> rows;
  std::vector<RingBlock> blocks;
  std::vector<RingGroup> groups;
  std::vector<int32_t> column_sources;  // of the columns of all passes: which one of the selection it is; -1: none
  std::vector<int32_t> head_columns;    // of every pass, of one list head
  std::vector<RingPassPlan> passes;     // of all chunks, then of the copies; without tokens: nothing to do
  // Rows of block statistics as they come from the ranks, `piece` each: where each belongs; -1: nowhere.
  std::vector<int32_t> statistics;
  int64_t piece = 0;
};

struct RingListRequest {
  const ContextLayout* layout = nullptr;
  int rank = 0;
  const ReplicatedKeys* replicated = nullptr;
  int replicated_blocks = 0;
  Shape shape;                       // with the tokens of this rank
  SelectionConfig config;            // of these sequences
  std::vector<SequenceTiles> tiles;  // of all sequences, whole
  std::vector<bool> left_out;        // sequences that take no part
  bool copies = false;               // whether keys that have copies are taken from them
  bool scored = false;               // whether selections are made by block statistics
  ScoreTile score = kPortableScoreTile;
  int32_t keys = kBlock;  // of an item of the backward (Tiling)
  int64_t batch_masses = 0;
  int multiprocessors = 1;
};
RingListPlan make_ring_lists(const RingListRequest& request);

// As above, in device memory; all are queued on `stream`.
struct RingCutParams {
  const RingRow* rows = nullptr;
  int32_t row_count = 0;
  const RingBlock* blocks = nullptr;
  int32_t passes = 0;
  const uint32_t* selected = nullptr;  // row lists of the selection
  uint32_t* row_entries = nullptr;     // may not be `selected`
  int32_t* pass_begin = nullptr;       // [row][passes + 1]
  const RingGroup* groups = nullptr;
  int32_t group_count = 0;
  const uint8_t* map = nullptr;
  const int32_t* head_columns = nullptr;    // [passes]
  const int32_t* column_sources = nullptr;  // [columns]
  int32_t* column_counts = nullptr;         // workspace: of the columns of the selection
  int32_t columns = 0;
  int32_t* column_offsets = nullptr;   // [columns + 1]
  uint32_t* column_entries = nullptr;  // as many as row entries
};
void cut_ring_lists(const RingCutParams& params, void* stream);

// The forward items of a pass, with its part of the lists.
void set_ring_items(const ForwardItem* items, int32_t count, const int32_t* pass_begin, int passes, int pass,
                    ForwardItem* to, void* stream);

// Statistics of key blocks from pieces of all ranks into the order of the sequences: rows of `words` 32-bit words each,
// which lie from_word (to_word) words apart, and rows from_row (to_row) words.
struct PlaceStatistics {
  const uint32_t* pieces = nullptr;
  uint32_t* to = nullptr;
  const int32_t* places = nullptr;  // [ranks · piece]
  int64_t piece = 0;
  int32_t ranks = 0, words = 0;
  int64_t from_row = 0, from_word = 0, to_row = 0, to_word = 0;
};
void place_statistics(const PlaceStatistics& params, void* stream);

}  // namespace sb::gpu
