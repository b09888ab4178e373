#pragma once

// How much attention mass the lists hold, and how much they would hold under other budgets, measured on a few tokens of
// every sequence: the CUDA twin of measure_coverage(). Queued like everything else; the host reads the results when it
// likes.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/gpu/launch/params.h"
#include "attention/gpu/select/select.h"

namespace sb::gpu {

struct CoverageSequence {
  int64_t scores = 0;             // its first triple in the workspace: [token][query head][key block]
  int64_t ranks = 0;              // [token][kv head][key block]
  int32_t token = 0, tokens = 0;  // in the packed tensors
  int32_t dense = 0;
  int32_t first_block = 0, blocks = 0;  // among the key blocks of all sequences
  int32_t first_token = 0;              // of its tokens that are measured
  int32_t sampled = 0;
  int32_t grid = 0, points = 0;  // budgets of its curve, in key blocks
  int64_t results = 0;           // first float: [token][kv head][1 + points]: held, then the curve; sums over the group
  int32_t gathered = -1;         // its first GatheredList; -1: no single keys
  // Of the whole sequence, of which this may be a piece: tokens, and rows to be measured; and whether more is to come.
  int32_t whole_tokens = 0, whole_sampled = 0;
  bool goes_on = false;
};
struct CoverageToken {
  int32_t sequence = 0, position = 0;
};
// A key block whose keys are here, where several ranks share the sequences.
struct CoverageBlock {
  int32_t sequence = 0, block = 0, token = 0;  // token: its first key, in the packed tensors
};
// Row entries of a measured token's list.
struct CoverageList {
  int32_t begin = 0, count = 0;
};

struct CoveragePlan {
  std::vector<CoverageSequence> sequences;
  std::vector<CoverageToken> tokens;
  std::vector<CoverageList> lists;  // [token][list head]
  std::vector<int32_t> grid;
  int32_t blocks = 0;
  int64_t results = 0;            // floats
  int64_t scores = 0, ranks = 0;  // triples of floats
};

// The most floats that measuring `rows` tokens of every sequence takes, in workspace and results, where all sequences
// together have `blocks` key blocks: a curve never has more than two points for each.
constexpr int64_t most_coverage_floats(int64_t rows, int64_t blocks, int64_t query_heads, int64_t kv_heads) {
  return rows * blocks * (3 * (query_heads + kv_heads) + 2 * kv_heads);
}

// The same for any piece of at most `tokens` tokens of a sequence of at most `longest`: of n tokens, a piece of p has
// at most rows · p / n + 1 that are measured, and they see at most n / block + 1 key blocks.
int64_t most_piece_coverage_floats(int64_t rows, int64_t tokens, int64_t longest, int block, int64_t query_heads,
                                   int64_t kv_heads);

// `rows` tokens of every sequence, spread evenly. `select` may be null when every sequence is dense. `gathered` as in
// RowLayout. Of a piece, `tiles` is about the whole sequence, of whose rows those are measured that lie in the piece.
CoveragePlan make_coverage_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                                const std::vector<SequenceTiles>& tiles, int rows, const SelectPlan* select,
                                std::span<const int32_t> gathered);

// Parts of a key block whose statistics estimate it. Where planes do that, or nothing, its whole has to do.
inline int judged_parts(const SelectionConfig& config) {
  return config.scores_blocks() && config.score != BlockScore::planes ? BlockScoring(config).parts() : 1;
}

struct CoverageParams {
  Shape shape;
  const void* q = nullptr;
  const void* k = nullptr;
  bool moments = true;
  // Where blocks are judged by planes, as in SelectParams; else null.
  const int32_t* planes = nullptr;
  const float* plane_scales = nullptr;
  int32_t plane_channels = 0;
  // Of the selection.
  int32_t block = kBlock, list_block = kBlock;  // tokens of a key block in the selection and in the lists
  int32_t parts = 1;                            // of a key block that are judged each by itself
  int32_t query_block = 1, list_query_block = 1;
  int32_t sinks = 0, local = 0, list_heads = 0;
  // The plan, in device memory.
  const CoverageSequence* sequences = nullptr;
  int32_t sequence_count = 0, blocks = 0;
  const CoverageToken* tokens = nullptr;
  int32_t token_count = 0;
  const CoverageList* lists = nullptr;
  const int32_t* grid = nullptr;
  const uint32_t* row_entries = nullptr;
  GatheredColumns gathered;
  // Where several ranks share the sequences: the key blocks that are here, and the numbers of those tokens whose lists
  // are here; q then has the measured tokens alone. Null: everything is here.
  const CoverageBlock* held = nullptr;
  const int32_t* own_tokens = nullptr;
  int32_t held_count = 0, own_count = 0;
  // Workspace and results.
  float* scores = nullptr;  // [3 · plan.scores]
  float* ranks = nullptr;   // [3 · plan.ranks]
  float* results = nullptr;
};

void measure_coverage(const CoverageParams& params, Precision precision, void* stream);
// Its two parts, for ranks that share sequences: scores of the key blocks that are here; then, when the scores of all
// are there, the results of the tokens whose lists are here.
void measure_blocks(const CoverageParams& params, Precision precision, void* stream);
void measure_tokens(const CoverageParams& params, Precision precision, void* stream);

}  // namespace sb::gpu
