#include "run/config/run_config_balance.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>

#include "core/errors.h"

namespace sb {
namespace {

// Which of the words an option has that is a number otherwise; none: a number, or something that is refused as one.
// Another word would be told to be a number, and not which words there are: `expected` says both.
std::optional<std::string> word_of(const ConfigValue& given, const std::string& label,
                                   std::initializer_list<std::string_view> words, std::string_view expected) {
  if (given.kind != ConfigValue::Kind::scalar || given.text.find_first_of("0123456789") != std::string::npos) return {};
  if (std::ranges::find(words, given.text) != words.end()) return given.text;
  throw UserError("{}: {}: expected {}, found {}", given.where, label, expected, given.describe());
}

}  // namespace

void add_balance_options(OptionTable& table, BalanceOptions& balance) {
  table.section("balance",
                "How the sequences of a step are divided among ranks, and how many keys each of them attends to "
                "(docs/balancing.md). Batching and ordering never change the result; tuning trades attention coverage "
                "between sequences.");
  table.word("balance.batching", &balance.batching, kBatchingWords,
             "in_order: in the order of the data; sab: sparsity-aware batching, which balances predicted latency at "
             "the expected budgets");
  for (const char* compared : {"length", "quadratic", "wlb"})
    table.refuse_word("balance.batching", compared,
                      "is no longer available for training, only in `sparsebalance simulate`; set sab, with a "
                      "balance.profile, or in_order");
  using Ordering = BalanceOptions::Ordering;
  table.choice<Ordering>(
      "balance.ordering", &balance.ordering, {{"none", Ordering::none}, {"auto", Ordering::automatic}},
      "order of the micro-batches in the pipeline; none: as batched; auto: the fastest in simulation");
  table.word("balance.tuning", &balance.tuning, kTuningWords,
             "how attention budgets are tuned; none: attention.budget everywhere; anchor: brings every micro-batch "
             "close to a common latency; optimal: the most coverage for the step time that balance.target asks for");
  table.word("balance.anchor", &balance.anchor, kAnchorWords,
             "tuning anchor: which latency is the common one: the mean, minimum or maximum of the micro-batches");
  table.number(
      "balance.p", &balance.p, 0.0, 1.0,
      "tuning: the largest fraction of its coverage at attention.budget that any layer of any sequence may lose");
  table.add(
      "balance.target", "equal_coverage or number", "0 to 1",
      "tuning optimal; equal_coverage: the shortest step whose mean coverage is at least that of attention.budget; a "
      "number: a deadline between the fastest possible step (0) and the step at attention.budget (1)",
      [&balance](const ConfigValue& given, const std::string& label) {
        const auto word = word_of(given, label, {"equal_coverage"}, "equal_coverage or a number from 0 to 1");
        balance.target = word ? -1.0 : config_number(given, label, 0.0, 1.0);
      },
      [&balance] { return balance.target < 0 ? std::string("equal_coverage") : fmt::format("{}", balance.target); });
  table.integer("balance.max_budget", &balance.max_budget, 0, std::numeric_limits<int32_t>::max(),
                "tuning: the largest budget it may assign, for which the memory of the block lists is planned; 0: four "
                "times attention.budget");
  table.add(
      "balance.chunk", "auto, none or number of tokens", "",
      "split long sequences into pieces that follow each other through the pipeline, with the same result; short ones "
      "are packed. A number of tokens (a multiple of attention.block): every longer sequence is split, and memory is "
      "planned for pieces; auto: the size that is fastest in simulation, or whole sequences (on GPUs with parallel.pp "
      "one choice for the whole run, made on its first batches); none: whole sequences",
      [&balance](const ConfigValue& given, const std::string& label) {
        if (const auto word = word_of(given, label, {"auto", "none"}, "auto, none or a number of tokens"))
          balance.chunk = *word == "auto" ? BalanceOptions::kAutomaticChunk : 0;
        else
          balance.chunk = config_integer(given, label, 1, int64_t{1} << 40);
      },
      [&balance] {
        return balance.chunk == 0  ? std::string("none")
               : balance.chunk < 0 ? std::string("auto")
                                   : fmt::format("{}", balance.chunk);
      });
  table.flag("balance.adapt", &balance.adapt,
             "correct predictions with measured times and coverage; false: plans depend on the configuration and the "
             "step alone");
  table.integer("balance.compare_steps", &balance.compare_steps, 0, OptionTable::kAny,
                "steps between comparisons that measure what balancing gains: the same batch also runs in order at "
                "attention.budget, and its result is discarded. Each costs one more forward and backward; 0: never");
  table.path("balance.profile", &balance.profile,
             "latency profile: a file written by `sparsebalance profile`, or a built-in one: h200 (measured, for "
             "Qwen2.5-0.5B and 3B), h200-analytic, h100-analytic, a100-analytic, h20-analytic");
  table.path("balance.links", &balance.links,
             "links between ranks, measured by `sparsebalance profile --links`, by which communication is predicted; "
             "empty: those of balance.profile");
  table.path("balance.replay", &balance.replay,
             "plan.jsonl of another run, whose plans are reused; it must cover every step up to train.max_steps; "
             "empty: make new plans");
}

namespace {

void check_offload(const RunConfig& config, const OptionTable& table) {
  if (!config.train.offload_optimizer) return;
  const std::string label = table.label("train.offload_optimizer");
  SB_USER_CHECK(config.device == DeviceKind::cuda,
                "{}: has no effect on the CPU, where master weights and moments are in host memory anyway; remove it, "
                "or set device: cuda",
                label);
  SB_USER_CHECK(config.dtype() == DType::bf16,
                "{}: cannot be combined with train.precision: float32, which computes with the master weights "
                "themselves and keeps them on the GPU; remove one of the two",
                label);
}

void check_recompute(const RunConfig& config, const OptionTable& table) {
  if (config.train.recompute != Recompute::chunk) return;
  const std::string label = table.label("train.recompute");
  SB_USER_CHECK(config.balance.chunk > 0,
                "{}: chunk recomputes the forward of pieces, but no sequence is split into pieces; set balance.chunk "
                "to their size in tokens, for example 8192, or train.recompute: layer",
                label);
  SB_USER_CHECK(config.parallel.pp == 1,
                "{}: chunk needs the backward of all pieces of a sequence to run before the next sequence starts, but "
                "with parallel.pp {} the pipeline interleaves them; set train.recompute: layer, or parallel.pp: 1",
                label, config.parallel.pp);
}

void check_chunk(const RunConfig& config, const OptionTable& table) {
  const int64_t chunk = config.balance.chunk;
  if (chunk == 0) return;
  const SelectionConfig& selection = config.attention.selection;
  const std::string label = table.label("balance.chunk");
  SB_USER_CHECK(selection.pattern != SelectionPattern::vertical_slash,
                "{}: pattern vertical_slash selects with the last queries of a sequence, which its first piece does "
                "not have; use another pattern, or balance.chunk: none",
                label);
  SB_USER_CHECK(
      selection.pattern == SelectionPattern::dense || selection.order == SelectionOrder::causal,
      "{}: with attention.selection: lookahead later tokens decide what earlier ones see, and a piece does not "
      "know those after it; use selection: causal, or balance.chunk: none",
      label);
  SB_USER_CHECK(config.balance.tuning != TuningPolicy::anchor,
                "{}: tuning anchor evens out micro-batches, but pieces are even already; use tuning: optimal or none, "
                "or balance.chunk: none",
                label);
  SB_USER_CHECK(config.parallel.cp == 1 || config.parallel.placement != ContextPlacement::zigzag,
                "{}: parallel.placement zigzag depends on the length of the whole sequence, but runs on pieces of it "
                "here; use placement: triangular, or balance.chunk: none",
                label);
  if (chunk < 0) return;
  const int64_t edge = std::lcm(selection.block, selection.query_block);
  SB_USER_CHECK(chunk % edge == 0,
                "{}: {} is not a multiple of {} tokens, where key blocks (attention.block {}) and query blocks "
                "(attention.query_block {}) both end; use {}",
                label, chunk, edge, selection.block, selection.query_block, (chunk + edge - 1) / edge * edge);
}

}  // namespace

bool wants_balancing(const BalanceOptions& balance) {
  return balance.batching != BatchingPolicy::in_order || balance.ordering != BalanceOptions::Ordering::none ||
         balance.tuning != TuningPolicy::none || balance.chunk == BalanceOptions::kAutomaticChunk ||
         !balance.profile.empty() || !balance.replay.empty();
}

void check_balance(const RunConfig& config, const OptionTable& table) {
  const BalanceOptions& balance = config.balance;
  const SelectionConfig& selection = config.attention.selection;
  const bool tuned = balance.tuning != TuningPolicy::none;
  SB_USER_CHECK(balance.anchor == AnchorKind::mean || balance.tuning == TuningPolicy::anchor,
                "{}: only applies to tuning: anchor; remove it", table.label("balance.anchor"));
  SB_USER_CHECK(balance.p < 1, "{}: must be below 1: at 1 a sequence could lose all of its coverage",
                table.label("balance.p"));
  SB_USER_CHECK(balance.target < 0 || balance.tuning == TuningPolicy::optimal,
                "{}: only applies to tuning: optimal; remove it", table.label("balance.target"));
  SB_USER_CHECK(!tuned || selection.pattern == SelectionPattern::topk || selection.pattern == SelectionPattern::mass,
                "{}: needs an attention.pattern that follows a budget; set it to topk or mass",
                table.label("balance.tuning"));
  SB_USER_CHECK(balance.max_budget == 0 || tuned || !balance.replay.empty(),
                "{}: only applies to balance.tuning and balance.replay; remove it", table.label("balance.max_budget"));
  SB_USER_CHECK(balance.max_budget == 0 || balance.max_budget >= selection.budget,
                "{}: {} is below attention.budget ({}), which tuning starts from; raise it, or set 0",
                table.label("balance.max_budget"), balance.max_budget, selection.budget);
  // As the planner refuses it, which is made only when the run has begun.
  const int64_t least = (selection.sink_blocks + selection.local_blocks + 2) * selection.block;
  SB_USER_CHECK(!wants_balancing(balance) || selection.pattern == SelectionPattern::dense || selection.budget >= least,
                "{}: {} is below {} sink + {} local + 2 blocks of {} tokens = {}, which balancing needs; raise it or "
                "lower attention.block",
                table.label("attention.budget"), selection.budget, selection.sink_blocks, selection.local_blocks,
                selection.block, least);
  SB_USER_CHECK(!tuned || !balance.adapt || config.attention.coverage_rows > 0,
                "{}: 0 leaves tuning without measured coverage; raise it, or set balance.adapt: false to tune with the "
                "built-in curves",
                table.label("attention.coverage_rows"));
  SB_USER_CHECK(balance.compare_steps == 0 || tuned || balance.batching != BatchingPolicy::in_order ||
                    balance.ordering != BalanceOptions::Ordering::none || !balance.replay.empty(),
                "{}: there is nothing to compare, because nothing is balanced; set balance.batching, or remove it",
                table.label("balance.compare_steps"));
  SB_USER_CHECK(balance.compare_steps == 0 || balance.chunk == 0,
                "{}: cannot be combined with balance.chunk, for which no memory is planned to run whole sequences in "
                "order; remove one of the two",
                table.label("balance.compare_steps"));
  SB_USER_CHECK(balance.links.empty() || wants_balancing(balance),
                "{}: nothing is predicted, because nothing is balanced; set balance.batching, or remove it",
                table.label("balance.links"));
  check_chunk(config, table);
  check_recompute(config, table);
  check_offload(config, table);
  const bool predicts = tuned || balance.chunk < 0 || balance.ordering != BalanceOptions::Ordering::none ||
                        balance.batching == BatchingPolicy::sab;
  SB_USER_CHECK(!predicts || !balance.profile.empty(),
                "{}: needs latency predictions, but balance.profile is not set. Measure this machine once with "
                "`sparsebalance profile --run FILE` (FILE: this configuration) and set balance.profile: profile.json; "
                "or name a built-in profile, for example h200-analytic, which measured times then correct",
                table.label(tuned                                                ? "balance.tuning"
                            : balance.chunk < 0                                  ? "balance.chunk"
                            : balance.ordering != BalanceOptions::Ordering::none ? "balance.ordering"
                                                                                 : "balance.batching"));
}

}  // namespace sb
