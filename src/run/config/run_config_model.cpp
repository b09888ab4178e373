#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "run/config/run_config.h"

namespace sb {

void adapt_model_config(const RunConfig& run, ModelConfig& config) {
  // max_position_embeddings may already be a scaled length; the model's own scaling then says the original.
  const int64_t own_length = config.rope.original_max_position_embeddings > 0
                                 ? config.rope.original_max_position_embeddings
                                 : config.max_position_embeddings;
  if (run.model.rope) {
    const double own_theta = config.rope.theta;
    config.rope = *run.model.rope;
    if (config.rope.theta == 0.0) config.rope.theta = own_theta;
    int64_t reach = run.data.max_sequence_length;  // another theta alone: as far as this run trains it
    if (config.rope.type != RopeConfig::Type::standard) {
      int64_t original = own_length;
      if (config.rope.type != RopeConfig::Type::linear) {
        if (config.rope.original_max_position_embeddings == 0)
          config.rope.original_max_position_embeddings = own_length;
        original = config.rope.original_max_position_embeddings;
      }
      reach = std::llround(static_cast<double>(original) * config.rope.factor);
    }
    // Some versions of transformers take the ratio of the two lengths for yarn's factor: it is written as that, also
    // where the model had been meant for more.
    config.max_position_embeddings =
        config.rope.type == RopeConfig::Type::yarn ? reach : std::max(config.max_position_embeddings, reach);
    check_model_config(config, "model.rope");
  }
  config.max_position_embeddings = longest_sequence(config);
  const int64_t length = run.data.max_sequence_length, unscaled = config.rope.original_max_position_embeddings > 0
                                                                      ? config.rope.original_max_position_embeddings
                                                                      : own_length;
  SB_USER_CHECK(length <= config.max_position_embeddings,
                "data.max_sequence_length: {} tokens, but the model supports {} (max_position_embeddings); lower it, "
                "or extend the model's context with model.rope (for example type: yarn, factor: {})",
                length, config.max_position_embeddings, unscaled > 0 ? (length + unscaled - 1) / unscaled : 1);
}

}  // namespace sb
