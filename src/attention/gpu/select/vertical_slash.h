#pragma once

// The pattern `vertical_slash` on the device: the last queries of a sequence say which columns (single keys) and which
// diagonals (distances in blocks) hold the mass; row and column lists, gathered columns and their bits follow from
// those. Lists are per query head. The CUDA twin of Selector::select_vertical_slash().

#include <cstdint>
#include <vector>

#include "attention/gpu/select/select.h"

namespace sb::gpu {

// Keys that are scored at a time.
constexpr int kSlashChunk = 64;

struct SlashSequence {
  int64_t first_chunk = 0;  // of query head 0, among the chunks of all heads of all sequences
  int64_t first_block = 0;  // likewise
  int32_t token = 0, tokens = 0;
  int32_t chunks = 0, blocks = 0;
  int32_t chunk_begin = 0;  // among the chunks of one head
  int32_t list = 0;         // GatheredList of query head 0
  int32_t vertical_cap = 0, slash_cap = 0;
};

struct SlashPlan {
  std::vector<SlashSequence> sequences;
  std::vector<int32_t> gathered;   // columns of a list of every sequence, at most; 0: dense
  int32_t head_chunks = 0;         // of one head
  int64_t chunks = 0, blocks = 0;  // of all heads
  int32_t lists = 0;
};

// Tokens of a query block in the lists: those of one key block select alike.
int slash_query_block(const SelectionConfig& config);
SlashPlan make_slash_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                          const std::vector<SequenceTiles>& tiles, const SelectionConfig& config);

struct SlashParams {
  SelectParams select;  // shape, operands, items, lists, map, column counts
  float vertical_coverage = 1, slash_coverage = 1;
  const SlashSequence* sequences = nullptr;
  int32_t sequence_count = 0, head_chunks = 0, lists = 0, max_blocks = 0;
  // Results beside the lists.
  GatheredColumns gathered;
  int32_t* columns = nullptr;
  uint64_t* bits = nullptr;
  // Workspace: of every chunk 64 · 3 + 4 floats, of every list 64, of every block of every head a float and a byte.
  float* chunk_values = nullptr;
  float* row_sums = nullptr;
  float* distances = nullptr;
  uint8_t* slashes = nullptr;
};
constexpr int64_t kSlashChunkFloats = 3 * kSlashChunk + 4;  // so that four at a time are read

void select_vertical_slash(const SlashParams& params, Precision precision, void* stream);

}  // namespace sb::gpu
