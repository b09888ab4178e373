#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/block_index.h"
#include "attention/select/tiles.h"

namespace sb {

// Masses of the competing key blocks: row r (a token, or the whole tile) at values + r·stride, `count` of them; the
// natural logarithm of the relative mass (each row's masses sum to about one).
struct BlockMasses {
  const float* values;
  int64_t stride;
  int rows;
  int64_t count;
  const float* row(int r) const { return values + r * stride; }
};

// How the tokens of a tile select in turn. Each token sees what all tokens before it selected; nothing later counts.
struct StaircaseRule {
  enum class Kind { topk, topp, mass };
  Kind kind = Kind::topk;
  int64_t first = 1;       // the most the first token may select
  int64_t total = 1;       // the most of the whole tile; spread evenly over the later tokens
  int rows = 1;            // tokens of a full tile
  double coverage = 1.0;   // topp: a token stops adding when its selected blocks hold this much
  float threshold = 0.0f;  // mass: log of the smallest mass worth selecting
  int64_t floor = 0;       // mass: the first token selects at least this many

  // The most that tokens 0 … row may have selected together.
  int64_t allowed(int row) const { return rows <= 1 ? total : first + (total - first) * row / (rows - 1); }
};

// Splits a tile's free quota into the first token's share and what later ones may add, `step` a token.
StaircaseRule staircase_rule(StaircaseRule::Kind kind, int64_t free_quota, int step, int query_block);

// Selects blocks for one tile and appends them, forced and own blocks included, ascending by block. `masses` covers
// competing(tile) blocks and has one row a token (causal), or a single row for the whole tile (lookahead, with a rule
// of one row); it may be empty when topk takes all candidates anyhow.
class Staircase {
 public:
  void select(const SequenceTiles& tiles, int64_t tile, const BlockMasses& masses, const StaircaseRule& rule,
              std::vector<IndexEntry>& out);

 private:
  std::vector<uint8_t> first_row_;  // kUnselected, or the row that selected the block
  std::vector<int32_t> order_;
};

// Sinks and as many of the latest blocks as the quota allows.
void select_window(const SequenceTiles& tiles, int64_t tile, std::vector<IndexEntry>& out);

// All blocks the tile can see.
void select_everything(const SequenceTiles& tiles, int64_t tile, std::vector<IndexEntry>& out);

}  // namespace sb
