#include "plan/simulate/layout_sweep.h"

#include <algorithm>

namespace sb {
namespace {

// What a run has by default: train.layer_chunk, train.loss_chunk.
constexpr int64_t kLayerChunk = 32768, kLossChunk = 1024;
// And where ranks share products (TokenShares).
constexpr int64_t kSharedPieces = 4, kLeastShared = 2048;
constexpr int64_t kBf16 = 2, kFp32 = 4;

// What is there once for every token that the tensor-parallel ranks share.
int64_t share(int64_t tokens, int64_t tp) {
  return (tokens + tp - 1) / tp;
}

// The temporaries of a layer that are there at once, where its projections and its MLP run in pieces: the larger of
// forward and backward. `shape`: of one tensor-parallel rank, which holds its tokens' hidden states and, of a piece,
// those of all tokens that the products need.
int64_t layer_workspace(const ModelShape& shape, int64_t tokens, int tp, bool last) {
  // Ranks that share products have several pieces, whose rows travel while others are multiplied: two at once.
  const int64_t piece =
      std::min(tokens, tp > 1 ? std::clamp(share(tokens, kSharedPieces), kLeastShared, kLayerChunk) : kLayerChunk);
  const int64_t rooms = tp > 1 && piece < tokens ? 2 : 1;
  const int64_t query = shape.heads * shape.head_dim, qkv = query + 2 * shape.kv_heads * shape.head_dim;
  const int64_t stream = kBf16 * share(tokens, tp) * shape.hidden, operands = kBf16 * tokens * qkv;
  // Besides the rows that a product reads: what it makes, on the way to the ranks' sums.
  const int64_t hidden = kBf16 * piece * shape.hidden, sums = tp > 1 ? rooms * hidden : 0;
  const int64_t norm = rooms * (hidden + kFp32 * piece), mlp = norm + kBf16 * piece * 3 * shape.intermediate + sums;
  const int64_t results = tokens * (kBf16 * query + kFp32 * shape.heads) + sums;
  const int64_t forward = 2 * stream + std::max(operands + std::max(norm + kBf16 * piece * qkv, results), mlp);
  // The operands again, then the MLP or the gradients of attention; the last stage's gradient lies elsewhere.
  const int64_t summed = tp > 1 ? hidden : 0;
  const int64_t backward = operands + std::max(stream + mlp + summed, operands + std::max(operands, norm + summed));
  return std::max(forward, backward + (last ? 0 : stream));
}

// What the gradients of a layer's weights are computed from, where they wait: gradients of the products' outputs, and
// inputs that were not kept.
int64_t waiting_gradients(const ModelShape& shape, int64_t tokens) {
  const int64_t qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  return kBf16 * tokens * (4 * shape.hidden + qkv + 3 * shape.intermediate);
}

// What attention's backward takes beside the layer: sums of the queries' gradients. In a ring also the copies of a pass
// over a rank's own tokens and another's (operands, results, their gradients, sums), and keys and values on their way.
int64_t attention_scratch(const ModelShape& shape, int64_t tokens, int ranks) {
  const int64_t query = shape.heads * shape.head_dim, keys = shape.kv_heads * shape.head_dim;
  const int64_t sums = kFp32 * tokens * query;
  if (ranks == 1) return sums;
  constexpr int64_t kRowNumbers = 3;  // log-sum-exp, and two that the backward makes
  const int64_t pass = 2 * tokens * (4 * kBf16 * (query + keys) + kFp32 * query + kRowNumbers * kFp32 * shape.heads);
  const int64_t travelling = std::min(ranks - 1, 2);
  return sums + pass + 2 * tokens * keys * (kFp32 + kBf16 * travelling + kFp32 * (travelling + 1));
}

}  // namespace

MemoryEstimate estimate_memory(const CostModel& cost, int64_t micro_batch_tokens, int64_t longest_cut) {
  const ModelShape& shape = cost.worker_shape();
  const Layout& layout = cost.layout();
  const int64_t tokens = (micro_batch_tokens + layout.cp - 1) / layout.cp, query = shape.heads * shape.head_dim;
  const int64_t stream = kBf16 * share(tokens, layout.tp) * shape.hidden;
  MemoryEstimate fullest;
  for (int s = 0; s < cost.stages(); ++s) {
    int64_t parameters = shape.layer_parameters() * cost.stage_layers(s);
    const bool first = s == 0, last = s + 1 == cost.stages();
    if (first) parameters += shape.embedding_parameters();
    if (last && !(first && shape.tied)) parameters += shape.embedding_parameters();
    MemoryEstimate stage;
    stage.weights = kBf16 * parameters;
    const int64_t rank = cost.profile().lora_rank;
    const int64_t trained = rank > 0 ? shape.adapter_parameters(rank) * cost.stage_layers(s) : parameters;
    if (rank > 0) stage.weights += kBf16 * trained;
    stage.gradients = kFp32 * trained;
    // fp32 master weights and two moments, sharded over data and context parallel ranks.
    stage.optimizer = 3 * kFp32 * trained / (layout.dp * layout.cp);
    // Forwards run ahead by the pieces of the longest sequence.
    const int64_t ahead = longest_cut > 0 ? (longest_cut + micro_batch_tokens - 1) / micro_batch_tokens : 1;
    const int64_t in_flight = layout.warmup_depth * (cost.stages() - 1 - s) + ahead;
    int64_t kept = stream + tokens * (kBf16 * query + kFp32 * shape.heads);
    const int64_t key_and_value = 2 * shape.kv_heads * shape.head_dim;
    if (longest_cut > 0) kept += kBf16 * tokens * key_and_value;
    stage.activations = (kept * cost.stage_layers(s) + stream) * in_flight;
    stage.activations += kFp32 * key_and_value * ((longest_cut + layout.cp - 1) / layout.cp) * cost.stage_layers(s);
    const int64_t attention = attention_scratch(shape, tokens, layout.cp);
    const int64_t logits = last ? kBf16 * kLossChunk * shape.vocabulary : 0;
    // Two of each kind: inputs and their gradients to the stage before, the outputs' gradients to the one after.
    const int64_t messages = 2 * stream * ((first ? 0 : 2) + (last ? 0 : 1));
    stage.workspace = layer_workspace(shape, tokens, layout.tp, last) + std::max(attention, logits) + messages;
    if (longest_cut > 0 && !first && cost.splits_backward())
      stage.workspace += cost.stage_layers(s) * waiting_gradients(shape, tokens);
    if (stage.total() > fullest.total()) fullest = stage;
  }
  return fullest;
}

std::vector<Layout> possible_layouts(const Layout& like, int workers, const ModelShape& shape, int64_t global_batch,
                                     const SweepLimits& most) {
  std::vector<Layout> layouts;
  for (int tp = 1; tp <= std::min(most.tp, workers); ++tp)
    for (int cp = 1; cp <= std::min(most.cp, workers / tp); ++cp) {
      if (workers % (tp * cp) != 0 || !sparse_tensor_parallel_problem(shape, tp).empty()) continue;
      const int rest = workers / (tp * cp);
      for (int pp = 1; pp <= rest; ++pp) {
        if (rest % pp != 0 || pp > shape.layers) continue;
        Layout layout = like;
        layout.dp = rest / pp;
        layout.pp = pp;
        layout.cp = cp;
        layout.tp = tp;
        if (layout.dp <= global_batch) layouts.push_back(layout);
      }
    }
  return layouts;
}

SweepRow simulate_layout(const LatencyModel& latency, const SimulateInput& like, const SimulatedPolicy& policy,
                         const Layout& layout) {
  const CostModel cost(latency, like.cost.spec(), layout);
  const SimulateInput input{cost,      like.coverage, like.pool,    like.global_batch, like.steps,
                            like.seed, like.seconds,  like.threads, like.step_done};
  SweepRow row;
  row.layout = layout;
  row.simulated = simulate_policy(input, policy);
  row.tokens_per_second = row.simulated.tokens / row.simulated.makespan_ms * 1e3;
  // Steps that cut sequences and steps that do not: memory is for both.
  const SimulatedRow& simulated = row.simulated;
  if (simulated.largest_micro_batch > 0)
    row.memory_bytes = estimate_memory(cost, simulated.largest_micro_batch).total();
  if (simulated.longest_cut > 0)
    row.memory_bytes =
        std::max(row.memory_bytes, estimate_memory(cost, simulated.largest_piece, simulated.longest_cut).total());
  const int64_t memory = latency.profile().memory_bytes;
  if (memory > 0) row.fits = row.memory_bytes <= memory;
  return row;
}

}  // namespace sb
