#pragma once

// Host side of the Hopper kernels: cuts packed sequences into tiles and columns, in the order in which the kernels
// should start them. Plain data to plain data.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/hopper/params.h"

namespace sb::hopper {

// The chosen key blocks of every (list head, query block): rows of all sequences one after the other, each sequence
// rounded up to whole query blocks; offsets[head * rows + row]. Entries ascend by key block.
struct RowLists {
  int32_t heads = 0;
  int32_t query_block = 0;
  int32_t rows = 0;
  std::vector<int32_t> offsets;
  std::vector<uint32_t> entries;
};

// The transpose: offsets[head * columns + column], entries (query block, first token) ascending.
struct ColumnLists {
  int32_t columns = 0;
  std::vector<int32_t> offsets;
  std::vector<uint32_t> entries;
};

struct Work {
  Tiling tiling;
  std::vector<int32_t> cu_subtiles;
  std::vector<ForwardItem> forward;
  std::vector<BackwardItem> backward;
  std::vector<ColumnSegment> segments;
  std::vector<SplitColumn> splits;
  int32_t partial_slots = 0;
  ColumnLists columns;
};

// Rows of 64 that hold whole tokens. `query_block` 0: no lists, every sequence is dense.
Tiling make_tiling(const Shape& shape, int list_heads, int query_block, std::span<const int32_t> cu_seqlens);

ColumnLists transpose(const RowLists& lists, std::span<const int32_t> cu_seqlens);

// `lists` may be null when every sequence is dense. `workers` is the number of multiprocessors that share the work: a
// column longer than a fair share is split.
Work make_work(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
               const RowLists* lists, int workers);

}  // namespace sb::hopper
