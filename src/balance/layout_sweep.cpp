#include "balance/layout_sweep.h"

#include <algorithm>

namespace sb {

MemoryEstimate estimate_memory(const CostModel& cost, int64_t micro_batch_tokens, int micro_batches) {
  const ModelShape& shape = cost.shape();
  const Layout& layout = cost.layout();
  const int64_t own_tokens = (micro_batch_tokens + layout.cp - 1) / layout.cp;
  MemoryEstimate fullest;
  for (int s = 0; s < cost.stages(); ++s) {
    int64_t parameters = shape.layer_parameters() * cost.stage_layers(s);
    const bool first = s == 0, last = s + 1 == cost.stages();
    if (first) parameters += shape.embedding_parameters();
    if (last && !(first && shape.tied)) parameters += shape.embedding_parameters();
    MemoryEstimate stage;
    stage.weights = 2 * parameters;
    stage.gradients = 4 * parameters;
    // fp32 master weights and two moments, sharded over data and context parallel ranks.
    stage.optimizer = 12 * parameters / (layout.dp * layout.cp);
    const int in_flight = std::min(micro_batches, layout.warmup_depth * (cost.stages() - 1 - s) + 1);
    const int64_t kept = 2 * (shape.hidden + shape.heads * shape.head_dim) + 4 * shape.heads;
    stage.activations = own_tokens * kept * cost.stage_layers(s) * in_flight;
    const int64_t wide =
        2 * (4 * shape.hidden + 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 4 * shape.intermediate);
    constexpr int64_t kLossChunk = 1024;
    stage.workspace = own_tokens * wide + (last ? kLossChunk * shape.vocabulary * 6 : 0);
    if (stage.total() > fullest.total()) fullest = stage;
  }
  return fullest;
}

std::vector<Layout> possible_layouts(const Layout& like, int workers, int64_t layers, int64_t global_batch,
                                     int max_cp) {
  std::vector<Layout> layouts;
  for (int cp = 1; cp <= std::min(max_cp, workers); ++cp) {
    if (workers % cp != 0) continue;
    for (int pp = 1; pp <= workers / cp; ++pp) {
      if (workers / cp % pp != 0 || pp > layers) continue;
      Layout layout = like;
      layout.dp = workers / cp / pp;
      layout.pp = pp;
      layout.cp = cp;
      if (layout.dp <= global_batch) layouts.push_back(layout);
    }
  }
  return layouts;
}

}  // namespace sb
