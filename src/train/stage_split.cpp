#include "train/stage_split.h"

#include "parallel/pipeline.h"
#include "plan/latency/cost_model.h"
#include "train/make_planner.h"

namespace sb {

std::vector<int> split_layers(const RunConfig& config, const ModelConfig& model) {
  if (config.balance.profile.empty() || config.parallel.pp == 1)
    return split_layers_evenly(model.layers, config.parallel.pp);
  const LatencyModel latency(run_profile(config, model));
  Layout layout;
  layout.dp = config.parallel.dp;
  layout.pp = config.parallel.pp;
  layout.cp = config.parallel.cp;
  layout.tp = config.parallel.tp;
  layout.split_tokens = config.data.max_sequence_length;
  const CostModel cost(latency, attention_spec(config), layout);
  std::vector<int> first_layers;
  for (int stage = 0; stage <= cost.stages(); ++stage) first_layers.push_back(cost.first_layer(stage));
  return first_layers;
}

}  // namespace sb
