#include "train/make_planner.h"

#include <algorithm>
#include <limits>
#include <set>

#include "attention/select/selection_words.h"
#include "comm/host_name.h"
#include "core/errors.h"
#include "core/log.h"
#include "plan/latency/adapter_profile.h"
#include "plan/latency/links_file.h"
#include "run/config/recompute_words.h"
#include "train/packing.h"
#include "train/stage_split.h"

namespace sb {
namespace {

TuningOptions tuning_options(const BalanceOptions& balance) {
  TuningOptions tuning;
  tuning.policy = balance.tuning;
  tuning.anchor = balance.anchor;
  tuning.p = balance.p;
  tuning.target = balance.target < 0 ? kEqualCoverage : balance.target;
  return tuning;
}

std::string recompute_name(Recompute recompute) {
  // Of pieces whose forward runs again all but the last take the same time more.
  return word_of(kRecomputeWords, kept_at_hand(recompute));
}

}  // namespace

ModelShape model_shape(const ModelConfig& model) {
  ModelShape shape;
  shape.name = "the model";
  shape.layers = model.layers;
  shape.hidden = model.hidden_size;
  shape.heads = model.heads;
  shape.kv_heads = model.kv_heads;
  shape.head_dim = model.head_dim;
  shape.intermediate = model.intermediate_size;
  shape.vocabulary = model.vocab_size;
  shape.tied = model.tie_word_embeddings;
  return shape;
}

int64_t largest_budget(const RunConfig& config) {
  const BalanceOptions& balance = config.balance;
  const SelectionConfig& selection = config.attention.selection;
  if (selection.pattern == SelectionPattern::dense) return 0;
  if (balance.tuning == TuningPolicy::none && balance.replay.empty()) return 0;
  // Lists take memory in proportion to it: room for whole sequences would be that of dense attention's pairs.
  return balance.max_budget > 0 ? balance.max_budget : 4 * selection.budget;
}

AttentionSpec attention_spec(const RunConfig& config) {
  const SelectionConfig& selection = config.attention.selection;
  AttentionSpec spec;
  spec.block = selection.block;
  spec.query_block = selection.query_block;
  spec.pattern = word_of(kPatternWords, selection.pattern);
  spec.score = word_of(kScoreWords, selection.score);
  spec.score_channels = selection.score == BlockScore::planes ? selection.score_channels : 0;
  spec.score_tokens = selection.score_tokens;
  spec.budget = selection.budget;
  spec.sink_blocks = selection.sink_blocks;
  spec.local_blocks = selection.local_blocks;
  spec.dense_below = selection.dense_below;
  spec.max_budget = largest_budget(config);
  const std::set<int64_t> dense_layers(selection.dense_layers.begin(), selection.dense_layers.end());
  for (const int64_t layer : dense_layers) spec.dense_layers.push_back(static_cast<int>(layer));
  if (selection.pattern == SelectionPattern::dense) {
    spec.dense_layers.clear();
    spec.dense_below = std::numeric_limits<int64_t>::max();
    spec.budget = std::max(spec.budget, spec.least_budget());
  }
  return spec;
}

RunConfig planned_config(RunConfig config) {
  if (!config.parallel.rehearse.on()) return config;
  config.parallel.dp = config.parallel.rehearse.dp;
  config.parallel.pp = config.parallel.rehearse.pp;
  return config;
}

Profile run_profile(const RunConfig& config, const ModelConfig& model) {
  // Plans that are used again need no latencies; predictions then come from a built-in table and are corrected.
  const bool given = !config.balance.profile.empty();
  const AttentionSpec spec = attention_spec(config);
  AttentionSpec scored = spec;
  if (!config.attention.selection.scores_blocks()) scored.score_channels = scored.score_tokens = 0;
  const int64_t lora_rank = config.lora_config().rank;
  Profile profile =
      find_profile(given ? config.balance.profile.string() : "h200-analytic", model_shape(model), scored, lora_rank);
  SB_USER_CHECK(
      profile.held_out.count == 0 || profile.recompute == recompute_name(config.train.recompute),
      "{}: was measured with --recompute {}, but train.recompute is {}; measure again, or change train.recompute",
      profile.name, profile.recompute, recompute_name(config.train.recompute));
  if (config.attention.selection.pattern != SelectionPattern::dense)
    check_measured_blocks(profile, spec, {"attention.block", "attention.query_block", "attention.score_tokens"});
  if (!given) log::info("balance.profile is not set: predictions start from {}", profile.name);
  if (const std::string links = config.balance.links.string(); !links.empty())
    profile.links = links_for(read_links_file(links), config.device == DeviceKind::cuda, links);
  return with_adapters(std::move(profile), lora_rank);
}

void check_links(const RunConfig& config, Communicator& world) {
  if (config.balance.links.empty() || config.parallel.rehearse.on()) return;
  const std::vector<std::string> hosts = host_names(world);
  if (world.rank() != 0) return;
  const std::string links = config.balance.links.string();
  if (const std::string elsewhere = measured_elsewhere(read_links_file(links), hosts); !elsewhere.empty())
    log::warning("{}: {}; measure again with `sparsebalance profile --links {}`", links, elsewhere, links);
}

std::string links_text(const RunConfig& config, const ModelConfig& model) {
  const bool alone = config.parallel.grid().ranks() == 1 && !config.parallel.rehearse.on();
  if (alone || config.balance.profile.empty()) return {};
  return describe(run_profile(config, model).links);
}

namespace {

// The size of pieces by which the first batches are fastest; 0: whole sequences.
int64_t fastest_chunk(RunConfig config, const ModelConfig& model, const SequenceSource& source, int64_t longest) {
  constexpr int64_t kBatches = 8;
  const LatencyModel latency(run_profile(config, model));
  Layout layout;
  layout.dp = config.parallel.dp;
  layout.pp = config.parallel.pp;
  layout.cp = config.parallel.cp;
  layout.tp = config.parallel.tp;
  layout.element_bytes = static_cast<int>(dtype_bytes(config.dtype()));
  const CostModel cost(latency, attention_spec(config), layout, split_layers(config, model));
  const auto coverage = power_coverage(0.22);  // nothing is learned yet
  PlanOptions options;
  options.batching.policy = config.balance.batching;
  options.batching.micro_batch_sequences = config.batch.micro_batch_sequences;
  options.ordering = config.balance.ordering == BalanceOptions::Ordering::automatic;
  options.tuning = tuning_options(config.balance);
  const auto time = [&](int64_t chunk) {
    options.chunk.tokens = config.balance.chunk = chunk;
    const PackingLimits limits = run_packing(config, longest);
    options.batching.micro_batch_tokens = limits.max_tokens;
    options.batching.max_sequences = most_sequences(config, limits);
    double sum = 0;
    for (int64_t step = 0; step < kBatches; ++step) {
      std::vector<Sequence> sequences;
      for (int64_t i = 0; i < config.batch.global_batch_size; ++i) {
        const int64_t position = step * config.batch.global_batch_size + i;
        sequences.push_back({position, source.length(static_cast<uint64_t>(position))});
      }
      sum += plan_step(step, cost, *coverage, sequences, options, {}).makespan_us;
    }
    return sum;
  };
  const auto fits = [&](int64_t tokens) {
    return config.batch.micro_batch_tokens == 0 || tokens <= config.batch.micro_batch_tokens;
  };
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<int64_t> sizes = chunk_sizes({ChunkOptions::kAutomatic, {}}, piece_edge(cost.spec()));
  // Of a size that nothing is longer than only the packs would be others, which is no reason to plan for pieces.
  std::erase_if(sizes, [&](int64_t size) { return !fits(size) || size >= longest; });
  // Where not even pieces fit, whole sequences say what is wrong.
  const double whole = fits(longest) || sizes.empty() ? time(0) : kNever;
  int64_t best = 0;
  double fastest = whole;
  for (const int64_t size : sizes)
    if (const double own = time(size); own < fastest) {
      fastest = own;
      best = size;
    }
  if (best == 0)
    log::info("balance.chunk auto: sequences stay whole, which is fastest in a simulation of the first {} batches",
              kBatches);
  else if (whole == kNever)
    log::info(
        "balance.chunk auto: pieces of {} tokens, since the longest sequence, of {}, exceeds batch.micro_batch_tokens",
        best, longest);
  else
    log::info(
        "balance.chunk auto: pieces of {} tokens, {:.2f} times as fast as whole sequences in a simulation of the first "
        "{} batches",
        best, whole / fastest, kBatches);
  return best;
}

}  // namespace

void settle_chunk(RunConfig& config, const ModelConfig& model, const SequenceSource& source, int64_t longest,
                  Communicator* world) {
  const bool automatic = config.balance.chunk == BalanceOptions::kAutomaticChunk;
  if (!automatic || config.device == DeviceKind::cpu || config.parallel.pp == 1) return;
  if (config.parallel.cp > 1) return;  // refused with what else cannot run in pieces
  if (world == nullptr || world->rank() == 0) config.balance.chunk = fastest_chunk(config, model, source, longest);
  if (world) world->broadcast(std::span(&config.balance.chunk, 1), 0);
}

std::unique_ptr<BalancedPlanner> make_balanced_planner(const RunConfig& run, const ModelConfig& model,
                                                       const PackingLimits& limits, const ReplayedSteps& steps,
                                                       int64_t first_step) {
  const RunConfig config = planned_config(run);
  BalancedPlannerOptions options;
  options.rehearsal = config.parallel.rehearse.on();
  options.plan.batching.policy = config.balance.batching;
  options.plan.batching.micro_batch_sequences = config.batch.micro_batch_sequences;
  options.plan.batching.micro_batch_tokens = limits.max_tokens;
  options.plan.batching.max_sequences = most_sequences(config, limits);
  options.plan.ordering = config.balance.ordering == BalanceOptions::Ordering::automatic;
  options.plan.tuning = tuning_options(config.balance);
  options.plan.chunk.tokens = config.balance.chunk;
  options.plan.chunk.kept_tokens = kept_tokens(config, limits);
  options.spec = attention_spec(config);
  options.layout.dp = config.parallel.dp;
  options.layout.pp = config.parallel.pp;
  options.layout.cp = config.parallel.cp;
  options.layout.tp = config.parallel.tp;
  options.layout.element_bytes = static_cast<int>(dtype_bytes(config.dtype()));
  options.first_layer = split_layers(config, model);
  options.adapt = config.balance.adapt;
  options.log = config.train.output_dir / "plan.jsonl";
  options.first_step = first_step;
  options.replay = config.balance.replay;
  Profile profile = run_profile(config, model);
  if (config.attention.selection.pattern != SelectionPattern::dense)
    if (const std::string otherwise = selected_otherwise(profile, options.spec); !otherwise.empty())
      log::warning("{}: {}", profile.name, otherwise);
  // Dense attention does not know the run's query blocks: tiles are counted as they were measured.
  if (config.attention.selection.pattern == SelectionPattern::dense && profile.attention)
    options.spec.query_block = profile.attention->query_block;
  return std::make_unique<BalancedPlanner>(std::move(profile), std::move(options), steps);
}

std::unique_ptr<StepPlanner> make_step_planner(const RunConfig& config, const ModelConfig& model,
                                               const PackingLimits& limits, int64_t first_step) {
  if (wants_balancing(config.balance)) return make_balanced_planner(config, model, limits, {}, first_step);
  const SelectionConfig& attention = config.attention.selection;
  const bool follows_budget =
      attention.pattern == SelectionPattern::topk || attention.pattern == SelectionPattern::mass;
  const InOrderCut cut{config.balance.chunk, piece_edge(attention_spec(config)), config.parallel.pp > 1};
  return std::make_unique<InOrderPlanner>(config.parallel.dp, model.layers, limits, attention.block,
                                          follows_budget ? attention.budget : 0, cut);
}

}  // namespace sb
