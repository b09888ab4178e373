#include "plan/latency/cost_model.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {
namespace {

constexpr double kGradientBytes = 4;

// Gathers and sums of the hidden states over the tensor-parallel ranks, for each layer: forward before the two products
// that are cut by columns and after the two that are cut by rows; backward the gradients of the latter two, which the
// products wait for, and, while products run, inputs that are gathered again and sums of their gradients.
constexpr double kGathersForward = 4, kGathersBackward = 2, kGathersBehindProducts = 4;
// Embedding, and head with loss: one of each in either direction. The loss's few numbers a token are left out.
constexpr double kGathersOfHead = 2;

// By the ranks that share tokens and heads, and by those that share key/value heads.
Work divided(const Work& work, double by, double by_keys) {
  return {work.tokens / by, work.tiles / by, work.pairs / by, work.scores / by_keys, work.prefix / by_keys};
}

constexpr double kNone = 1e300;
constexpr double kEqual = 1 + 1e-9;  // sums in another order

// Where every stage begins, and one past the last layer: the slowest stage is as fast as possible; of such splits the
// one with the least sum of squares; of those the one with the larger last stage (the only one that needs no warm-up),
// then with larger earlier ones. `costs(stage, begin, end)`: of a stage with these layers.
template <typename Costs>
std::vector<int> split(const Costs& costs, int layers, int stages) {
  const auto width = static_cast<size_t>(layers) + 1;
  std::vector<double> slowest(width, kNone);  // of the stages so far, by where they end
  slowest[0] = 0;
  for (int stage = 0; stage < stages; ++stage)
    for (int end = layers; end >= 0; --end) {
      double least = kNone;
      for (int begin = 0; begin < end; ++begin)
        least = std::min(least, std::max(slowest[static_cast<size_t>(begin)], costs(stage, begin, end)));
      slowest[static_cast<size_t>(end)] = least;
    }
  const double most = slowest.back() * kEqual;
  struct Best {
    double squares = kNone;
    int begin = 0;  // of the stage that ends here
  };
  std::vector<std::vector<Best>> best(static_cast<size_t>(stages) + 1, std::vector<Best>(width));
  best[0][0].squares = 0;
  for (int stage = 0; stage < stages; ++stage)
    for (int end = 1; end <= layers; ++end)
      for (int begin = 0; begin < end; ++begin) {
        const double cost = costs(stage, begin, end);
        const double before = best[static_cast<size_t>(stage)][static_cast<size_t>(begin)].squares;
        if (cost > most || before >= kNone) continue;
        Best& here = best[static_cast<size_t>(stage) + 1][static_cast<size_t>(end)];
        const double squares = before + cost * cost;
        const bool last = stage == stages - 1;
        if (last ? squares * kEqual < here.squares : squares <= here.squares * kEqual) here = {squares, begin};
      }
  std::vector<int> first_layer(1, layers);
  for (int stage = stages; stage > 0; --stage)
    first_layer.push_back(best[static_cast<size_t>(stage)][static_cast<size_t>(first_layer.back())].begin);
  std::reverse(first_layer.begin(), first_layer.end());
  return first_layer;
}

}  // namespace

CostModel::CostModel(const LatencyModel& latency, AttentionSpec spec, Layout layout)
    : latency_(latency), spec_(as_measured(latency.profile(), std::move(spec))), layout_(layout) {
  check();
  share_layers();
  split_layers();
  prepare_communication();
}

CostModel::CostModel(const LatencyModel& latency, AttentionSpec spec, Layout layout, std::vector<int> first_layer)
    : latency_(latency),
      spec_(as_measured(latency.profile(), std::move(spec))),
      layout_(layout),
      first_layer_(std::move(first_layer)) {
  check();
  share_layers();
  bool fits =
      std::ssize(first_layer_) == layout_.pp + 1 && first_layer_.front() == 0 && first_layer_.back() == layers();
  for (size_t s = 1; fits && s < first_layer_.size(); ++s) fits = first_layer_[s] > first_layer_[s - 1];
  SB_CHECK(fits, "the split does not fit {} stages and {} layers", layout_.pp, layers());
  prepare_communication();
}

void CostModel::prepare_communication() {
  for (int s = 0; s < stages(); ++s) {
    transfer_.push_back(transfer_per_token(s));
    add_exposed_of(s);
  }
}

void CostModel::check() const {
  SB_USER_CHECK(layout_.dp > 0 && layout_.pp > 0 && layout_.cp > 0 && layout_.tp > 0,
                "dp {}, pp {}, cp {} and tp {} must be positive", layout_.dp, layout_.pp, layout_.cp, layout_.tp);
  const std::string problem = tensor_parallel_problem(shape(), layout_.tp);
  SB_USER_CHECK(problem.empty(), "tp {}: {}; lower tp", layout_.tp, problem);
  SB_USER_CHECK(layout_.pp <= shape().layers, "pp {} exceeds the {} layers of {}: a stage would be empty; lower pp",
                layout_.pp, shape().layers, shape().name);
  SB_USER_CHECK(layout_.warmup_depth >= 1, "warmup depth must be at least 1, got {}", layout_.warmup_depth);
  SB_USER_CHECK(spec_.block > 0 && spec_.query_block > 0, "block and query block must be positive");
  SB_USER_CHECK(spec_.budget >= spec_.least_budget(),
                "budget {} is below {} sink + {} local + 2 blocks of {} tokens = {}; raise it or shrink the block",
                spec_.budget, spec_.sink_blocks, spec_.local_blocks, spec_.block, spec_.least_budget());
  for (const int layer : spec_.dense_layers)
    SB_USER_CHECK(layer >= 0 && layer < layers(),
                  "attention.dense_layers: there is no layer {}; the model has layers 0 to {}", layer, layers() - 1);
  SB_USER_CHECK(spec_.max_budget == 0 || spec_.max_budget >= spec_.budget,
                "the largest budget {} is below the base budget {}", spec_.max_budget, spec_.budget);
}

void CostModel::share_layers() {
  worker_shape_ = shape().of_rank(layout_.tp);
  linear_share_ =
      static_cast<double>(worker_shape_.layer_parameters()) / static_cast<double>(shape().layer_parameters());
}

void CostModel::split_layers() {
  // Costs relative to a sparse layer.
  const int64_t tokens = layout_.split_tokens > 0 ? layout_.split_tokens : 2 * spec_.budget;
  const auto time = [](const StageTime& t) { return t.forward + t.backward; };
  const auto layer_time = [&](int64_t budget) {
    return time(linear(static_cast<double>(tokens))) + time(attention(work_of(spec_, tokens, budget)));
  };
  const double layer = layer_time(spec_.base_budget(tokens)), dense = layer_time(tokens) / layer;
  const double extra = time(head(static_cast<double>(tokens))) / layer;
  const int layers = static_cast<int>(shape().layers), stages = layout_.pp;
  std::vector<int> dense_before(1, 0);
  for (int l = 0; l < layers; ++l) dense_before.push_back(dense_before.back() + (spec_.dense_layer(l) ? 1 : 0));
  const auto costs = [&](int stage, int begin, int end) {
    const int of_dense = dense_before[static_cast<size_t>(end)] - dense_before[static_cast<size_t>(begin)];
    return (end - begin - of_dense) + of_dense * dense + (stage == stages - 1 ? extra : 0.0);
  };
  first_layer_ = split(costs, layers, stages);
}

// One all-gather or reduce-scatter of the hidden states over the tensor-parallel ranks.
double CostModel::gathering(double tokens) const {
  if (layout_.tp == 1 || !layout_.comm) return 0;
  const Links& links = profile().links;
  const double bytes = tokens / layout_.cp * static_cast<double>(shape().hidden) * layout_.element_bytes;
  // Where a group of them lies on two nodes it is the slowest.
  LinkGroup group = group_of_ranks(layout_.tp, 1, 1, 0, links.node_ranks);
  if (links.node_ranks % layout_.tp != 0 && layout_.workers() > links.node_ranks && group.nodes == 1)
    group = {layout_.tp, 2, 1};
  return links.gather(bytes, group, used_in_node());
}

StageTime CostModel::linear(double tokens) const {
  Work work;
  work.tokens = tokens / layout_.cp * linear_share_;
  StageTime time{latency_.predict(Operation::linear_forward, work), latency_.predict(Operation::linear_backward, work)};
  if (layout_.tp > 1) {
    const double gather = gathering(tokens);
    // What is computed again needs the sums of attention's product again.
    const double again = profile().recompute == "none" ? 0 : 1;
    time.forward += kGathersForward * gather;
    time.backward = std::max(time.backward, kGathersBehindProducts * gather) + (kGathersBackward + again) * gather;
  }
  return time;
}

StageTime CostModel::attention(const Work& whole) const {
  const int shared = layout_.cp * layout_.tp;
  const double by_keys = static_cast<double>(layout_.cp) * static_cast<double>(shape().kv_heads) /
                         static_cast<double>(worker_shape_.kv_heads);
  const Work work = shared == 1 ? whole : divided(whole, shared, by_keys);
  StageTime time{latency_.predict(Operation::attention_forward, work),
                 latency_.predict(Operation::attention_backward, work)};
  if (layout_.cp > 1 && layout_.comm) {
    // The ring sends keys and values (forward), and their gradients too (backward), behind the computation.
    const ModelShape& s = worker_shape_;
    const double bytes =
        whole.tokens / layout_.cp * 2.0 * static_cast<double>(s.kv_heads * s.head_dim) * layout_.element_bytes;
    const Links& links = profile().links;
    const Link link = shared <= links.node_ranks ? links.transfer_inside : links.between(used_in_node());
    time.forward = std::max(time.forward, (layout_.cp - 1) * link(bytes));
    time.backward = std::max(time.backward, (layout_.cp - 1) * link(2 * bytes));
  }
  time.forward += latency_.predict(Operation::selection, work);
  return time;
}

StageTime CostModel::head(double tokens) const {
  if (!layout_.head) return {};
  Work work;
  work.tokens = tokens / (layout_.cp * layout_.tp);
  const double gathers = kGathersOfHead * gathering(tokens);
  return {latency_.predict(Operation::head_forward, work) + gathers,
          latency_.predict(Operation::head_backward, work) + gathers};
}

double CostModel::after_input_gradient(const StageTime& linear) const {
  if (!splits_backward()) return 0;
  // As many products as forward, which has the norms and activation functions besides; backward has as many for the
  // inputs, too.
  return std::min(linear.forward, linear.backward / 2);
}

double CostModel::gradient_transfer(int stage, double tokens, const StageTime& linear, bool split) const {
  if (stage + 1 == stages()) return 0;
  const double early = split ? stage_layers(stage + 1) * after_input_gradient(linear) : 0;
  return transfer(stage + 1, tokens) - early;
}

Link CostModel::transfer_per_token(int stage) const {
  if (!layout_.comm || stage == 0) return {};
  const Links& links = profile().links;
  const int ranks = layout_.cp * layout_.tp;  // of a stage: each sends its own tokens' hidden states
  const bool same_node = (stage - 1) * ranks / links.node_ranks == stage * ranks / links.node_ranks;
  const double bytes = static_cast<double>(shape().hidden) * layout_.element_bytes / ranks;
  const Link link = same_node ? links.transfer_inside : links.between(used_in_node());
  return {link.latency_us, link.us_per_byte * bytes};
}

int CostModel::used_in_node() const {
  return std::min(layout_.workers(), profile().links.node_ranks);
}

// Parameters that become final together, in the order in which the backward makes them so.
std::vector<double> CostModel::groups_of(int stage) const {
  const int64_t rank = profile().lora_rank;
  const bool first = stage == 0, last = stage == stages() - 1;
  const ModelShape& own = worker_shape_;
  const auto layer = static_cast<double>(rank > 0 ? own.adapter_parameters(rank) : own.layer_parameters());
  const bool head = rank == 0 && layout_.head;
  std::vector<double> groups(static_cast<size_t>(stage_layers(stage)), layer);
  if (head && last && (!first || !own.tied))
    groups.insert(groups.begin(), static_cast<double>(own.embedding_parameters()));
  if (head && first) groups.push_back(static_cast<double>(own.embedding_parameters()));
  return groups;
}

// Parameters that are reduced and gathered together.
struct CostModel::Bucket {
  double ready = 0;  // share of the backward after which its gradients are there
  double sum = 0, gather = 0;
};

// In the order in which the backward completes them; layers take equal parts of it, embedding and head none.
std::vector<CostModel::Bucket> CostModel::buckets_of(int stage, const LinkGroup& replicas) const {
  constexpr double kBucket = 4 << 20;  // parameters, at least (ModelLayout)
  const Links& links = profile().links;
  const std::vector<double> groups = groups_of(stage);
  const auto layers = static_cast<double>(stage_layers(stage));
  const bool head_first =
      std::ssize(groups) > stage_layers(stage) && stage == stages() - 1 && (stage > 0 || !worker_shape_.tied);
  std::vector<Bucket> buckets;
  double held = 0, seen = head_first ? -1 : 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    held += groups[i];
    seen += 1;
    if (held < kBucket && i + 1 < groups.size()) continue;
    buckets.push_back({std::min(seen, layers) / layers, links.reduce(held * kGradientBytes, replicas, used_in_node()),
                       links.gather(held * layout_.element_bytes, replicas, used_in_node())});
    held = 0;
  }
  return buckets;
}

// First and last stage of a pipeline have the same matrix and add its gradients up, each rank its piece.
double CostModel::ends_of(int stage, int replicas) const {
  const bool end = stage == 0 || stage == stages() - 1;
  if (!end || stages() == 1 || !worker_shape_.tied || !layout_.head || profile().lora_rank > 0) return 0;
  const Links& links = profile().links;
  const LinkGroup ends = group_of_ranks(2, (stages() - 1) * layout_.cp * layout_.tp, 1, 0, links.node_ranks);
  const double bytes = static_cast<double>(worker_shape_.embedding_parameters()) * kGradientBytes / replicas;
  return links.reduce(bytes, ends, used_in_node()) + links.gather(bytes, ends, used_in_node());
}

// Buckets are summed one after the other, each from when the backward has made the last of its gradients. After the
// update they are gathered one after the other, the other way round, each until the next forward comes to it: what the
// backward made last is needed first.
void CostModel::add_exposed_of(int stage) {
  tail_.emplace_back();
  gather_.emplace_back();
  if (!layout_.comm) return;
  const int ranks = layout_.cp * layout_.tp;
  const LinkGroup replicas =
      group_of_ranks(layout_.cp, layout_.tp, layout_.dp, ranks * layout_.pp, profile().links.node_ranks);
  const double after = ends_of(stage, replicas.ranks);
  tail_.back() = Exposed(after);
  if (replicas.ranks == 1) return;
  // Of the buckets between the first and the last none decides, since layers are alike.
  const std::vector<Bucket> buckets = buckets_of(stage, replicas);
  Bucket all, last;  // of the backward
  for (const Bucket& bucket : buckets) {
    const bool is_last = bucket.ready >= 1;
    all.sum += bucket.sum;
    all.gather += bucket.gather;
    last.sum += is_last ? bucket.sum : 0;
    last.gather += is_last ? bucket.gather : 0;
  }
  const double hidden = 1 - buckets.front().ready;
  tail_.back() = {after + last.sum, after + all.sum, hidden};
  gather_.back() = {last.gather, all.gather, hidden};
}

void CostModel::add_exposed(PipelineTimes& times) const {
  times.tail = tail_;
  times.gather = gather_;
}

}  // namespace sb
