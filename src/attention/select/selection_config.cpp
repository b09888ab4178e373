#include "attention/select/selection_config.h"

#include <algorithm>

#include "attention/select/selection_words.h"
#include "core/errors.h"

namespace sb {

bool selection_looks_ahead(const SelectionConfig& config) {
  return config.pattern == SelectionPattern::vertical_slash ||
         (config.order == SelectionOrder::lookahead && config.scores_blocks());
}

std::string why_not_in_pieces(const SelectionConfig& config) {
  if (!selection_looks_ahead(config)) return {};
  return config.pattern == SelectionPattern::vertical_slash
             ? "attention.pattern: vertical_slash selects with the last queries of the whole sequence"
             : "attention.selection: lookahead lets later tokens decide what earlier ones see";
}

void check_selection_config(const SelectionConfig& config) {
  SB_USER_CHECK(config.block == 64 || config.block == 128 || config.block == 256,
                "attention.block: {} tokens are not supported; use 64, 128 or 256", config.block);
  SB_USER_CHECK(
      config.query_block >= 1 && config.query_block <= 128 && (config.query_block & (config.query_block - 1)) == 0,
      "attention.query_block: {} tokens; must be a power of two from 1 to 128", config.query_block);
  SB_USER_CHECK(config.score_tokens >= 0 && (config.score_tokens == 0 || config.block % config.score_tokens == 0),
                "attention.score_tokens: {} does not divide attention.block {}; use 0 (the whole block) or a power of "
                "two up to {}",
                config.score_tokens, config.block, config.block);
  if (config.score == BlockScore::planes && config.scores_blocks()) {
    SB_USER_CHECK(config.score_tokens == 0,
                  "attention.score_tokens: {} has no effect with attention.score: planes, which scores every key by "
                  "itself; remove it, or set attention.score: moments",
                  config.score_tokens);
    SB_USER_CHECK(
        config.score_channels >= 2 && config.score_channels % 2 == 0,
        "attention.score_channels: {}; must be an even number of at least 2, since a rotary plane has two channels",
        config.score_channels);
  }
  SB_USER_CHECK(config.budget >= 1, "attention.budget: {} keys per query; must be at least 1", config.budget);
  SB_USER_CHECK(config.sink_blocks >= 0, "attention.sink_blocks: {}; must not be negative", config.sink_blocks);
  SB_USER_CHECK(config.local_blocks >= 0, "attention.local_blocks: {}; must not be negative", config.local_blocks);
  SB_USER_CHECK(config.step >= 0 && config.step <= 64, "attention.step: {}; must be 0 to 64 blocks per token",
                config.step);
  SB_USER_CHECK(config.coverage > 0 && config.coverage <= 1, "attention.coverage: {}; must be above 0 and at most 1",
                config.coverage);
  SB_USER_CHECK(config.vertical_coverage > 0 && config.vertical_coverage <= 1,
                "attention.vertical_coverage: {}; must be above 0 and at most 1", config.vertical_coverage);
  SB_USER_CHECK(config.slash_coverage > 0 && config.slash_coverage <= 1,
                "attention.slash_coverage: {}; must be above 0 and at most 1", config.slash_coverage);
  SB_USER_CHECK(config.vertical_cap >= 0 && config.slash_cap >= 0,
                "attention.vertical_cap and slash_cap must not be negative");
  SB_USER_CHECK(config.pattern != SelectionPattern::vertical_slash || config.order == SelectionOrder::lookahead,
                "attention.pattern: vertical_slash selects with the last queries of a sequence, so that earlier tokens "
                "depend on later ones; set attention.selection: lookahead to confirm that this is intended");
}

void settle_score_channels(SelectionConfig& config, int head_dim) {
  if (config.score_channels == SelectionConfig().score_channels)
    config.score_channels = std::min(config.score_channels, head_dim / 2 * 2);
  check_score_channels(config, head_dim);
}

void check_score_channels(const SelectionConfig& config, int head_dim) {
  SB_USER_CHECK(config.score != BlockScore::planes || config.score_channels <= head_dim,
                "attention.score_channels: {}, but the model's heads have {} channels; lower it to that or less",
                config.score_channels, head_dim / 2 * 2);
}

SelectionPattern parse_selection_pattern(const std::string& name) {
  return value_of(kPatternWords, name, "attention.pattern");
}

SelectionOrder parse_selection_order(const std::string& name) {
  return value_of(kOrderWords, name, "attention.selection");
}

BlockScore parse_block_score(const std::string& name) {
  return value_of(kScoreWords, name, "attention.score");
}

}  // namespace sb
