#pragma once

// Host side of the CUDA kernels: cuts packed sequences into tiles and key blocks, in the order in which the kernels
// should start them. Plain data to plain data.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/gpu/launch/params.h"

namespace sb::gpu {

constexpr int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Where the row lists of every (list head, query block) are: rows of all sequences one after the other, each sequence
// rounded up to whole query blocks; row r of head h is offsets[h * rows + r] … of the entries.
struct RowLayout {
  int32_t heads = 0;
  int32_t query_block = 0;
  int32_t block = kBlock;
  int32_t keys = kBlock;  // of an item of the backward (Tiling)
  int32_t rows = 0;
  std::span<const int32_t> offsets;
  std::span<const int32_t> gathered = {};  // gathered columns of a list head of every sequence, at most; empty: none
};

struct Work {
  Tiling tiling;
  std::vector<int32_t> cu_subtiles;
  std::vector<ForwardItem> forward;
  std::vector<BackwardItem> places;  // [kv head][key block of all sequences]; what make_backward_work starts from
  int32_t head_places = 0;           // of a key/value head
  int32_t columns = 0;               // key blocks of all sequences
  int32_t workers = 0;
  WorkLimits limits;
  std::vector<GatheredList> gathered;
  std::vector<int32_t> gathered_pieces;
  int64_t gathered_columns = 0, gathered_words = 0;
  int32_t gathered_places = 0;  // key blocks of all gathered lists
};

// Rows of 64 that hold whole tokens. `query_block` 0: no lists, every sequence is dense.
Tiling make_tiling(const Shape& shape, int list_heads, int query_block, std::span<const int32_t> cu_seqlens);

// Of a piece (Shape::first_query) the row lists are those of its own query blocks, which column lists count from its
// first. `lists` may be null when every sequence is dense. `workers` is the number of multiprocessors that share the
// work.
Work make_work(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
               const RowLayout* lists, int workers);

}  // namespace sb::gpu
