#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

enum class SelectionPattern { dense, topk, mass, topp, vertical_slash, window };
// causal: every token selects by its own query, in order (the staircase). lookahead: a whole query block selects at
// once, as published block-level methods do; later tokens then influence what earlier ones see.
enum class SelectionOrder { causal, lookahead };
// What estimates the attention mass of a key block: its largest key over the channels that matter (planes.h), its mean
// and variance per channel, or its mean only.
enum class BlockScore { planes, moments, mean };

struct SelectionConfig {
  SelectionPattern pattern = SelectionPattern::topk;
  SelectionOrder order = SelectionOrder::causal;
  BlockScore score = BlockScore::moments;
  int score_channels = 32;   // planes: channels of a head that are multiplied
  int score_tokens = 0;      // keys of a block that are judged together; 0: the whole block
  int block = 128;           // tokens of a key block
  int query_block = 16;      // tokens that share one list
  int64_t budget = 8192;     // keys per query where the micro-batch gives none
  int sink_blocks = 1;       // first blocks, always selected
  int local_blocks = 2;      // blocks right before the query block, always selected
  int step = 1;              // blocks each later token of a query block may add
  int64_t dense_below = -1;  // sequences up to this length run dense; -1: the budget
  double coverage = 0.95;    // topp: mass each token wants to reach
  // vertical_slash: mass to reach by columns and by diagonals, and the most of each (columns in tokens, diagonals in
  // blocks).
  double vertical_coverage = 0.95;
  double slash_coverage = 0.95;
  int64_t vertical_cap = 4096;
  int64_t slash_cap = 32;
  std::vector<int64_t> dense_layers;  // layers that run dense whatever the budget

  int64_t dense_limit() const { return dense_below < 0 ? budget : dense_below; }
  bool operator==(const SelectionConfig&) const = default;
  // Whether key blocks are judged by their statistics.
  bool scores_blocks() const {
    return pattern == SelectionPattern::topk || pattern == SelectionPattern::topp || pattern == SelectionPattern::mass;
  }
  bool judges_by_planes() const { return scores_blocks() && score == BlockScore::planes; }
  // `mass` carries thresholds from step to step; look-ahead finds them anew in every sequence.
  bool learns_thresholds() const { return pattern == SelectionPattern::mass && order == SelectionOrder::causal; }
  bool lists_per_query_head() const { return pattern == SelectionPattern::vertical_slash; }
};

// Whether what a token sees may depend on later ones: then a sequence cannot be selected for piece by piece.
bool selection_looks_ahead(const SelectionConfig& config);
// The reason in words; empty where it can.
std::string why_not_in_pieces(const SelectionConfig& config);

// UserError with the key's name when a value does not work.
void check_selection_config(const SelectionConfig& config);
// The same for what depends on the width of a head, and heads narrower than the default number of channels take all
// of theirs.
void settle_score_channels(SelectionConfig& config, int head_dim);
// Without that.
void check_score_channels(const SelectionConfig& config, int head_dim);

SelectionPattern parse_selection_pattern(const std::string& name);
SelectionOrder parse_selection_order(const std::string& name);
BlockScore parse_block_score(const std::string& name);

}  // namespace sb
