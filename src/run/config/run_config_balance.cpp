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
  table.section(
      "balance",
      "How a step's sequences are divided among ranks, and how many keys each attends to; docs/balancing.md. Batching "
      "and ordering never change the result, tuning trades attention coverage between sequences.");
  table.word("balance.batching", &balance.batching, kBatchingWords,
             "in_order: as they come; sab: balances predicted latency at the expected budgets");
  for (const char* compared : {"length", "quadratic", "wlb"})
    table.refuse_word("balance.batching", compared,
                      "is compared in `sparsebalance simulate` and no longer trains; set sab, with a "
                      "balance.profile, or in_order");
  using Ordering = BalanceOptions::Ordering;
  table.choice<Ordering>("balance.ordering", &balance.ordering,
                         {{"none", Ordering::none}, {"auto", Ordering::automatic}},
                         "auto: the order of micro-batches in the pipeline that is fastest by simulation");
  table.word("balance.tuning", &balance.tuning, kTuningWords,
             "of attention budgets. none: attention.budget everywhere; anchor: every micro-batch towards a "
             "common latency; optimal: the most coverage in the shortest step");
  table.word("balance.anchor", &balance.anchor, kAnchorWords,
             "tuning anchor: which of the micro-batches' latencies is the common one");
  table.number("balance.p", &balance.p, 0.0, 1.0,
               "tuning: the most that a (sequence, layer) may lose of its coverage at attention.budget, as a share");
  table.add(
      "balance.target", "number or word", "equal_coverage, or 0 to 1",
      "tuning optimal: the shortest step whose mean coverage is not below that of attention.budget, or a deadline "
      "between the fastest possible step (0) and the one at attention.budget (1)",
      [&balance](const ConfigValue& given, const std::string& label) {
        const auto word = word_of(given, label, {"equal_coverage"}, "equal_coverage or a number from 0 to 1");
        balance.target = word ? -1.0 : config_number(given, label, 0.0, 1.0);
      },
      [&balance] { return balance.target < 0 ? std::string("equal_coverage") : fmt::format("{}", balance.target); });
  table.integer(
      "balance.max_budget", &balance.max_budget, 0, std::numeric_limits<int32_t>::max(),
      "tuning: the largest budget that it gives; memory for the lists of selected blocks is planned for it. 0: "
      "four times attention.budget");
  table.add(
      "balance.chunk", "number or word", "auto, none, or tokens",
      "long sequences are cut into pieces that follow each other through the pipeline, with the same result; short "
      "ones "
      "are packed. A number (a multiple of attention.block): every sequence above this many tokens is cut, and memory "
      "is "
      "planned for pieces; auto: the size, or whole sequences, by which a step is fastest (on GPUs with "
      "parallel.pp one size for the run, by which its first batches are)",
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
             "measured times and coverage correct the predictions; false: a plan follows from the configuration and "
             "the step alone");
  table.integer(
      "balance.compare_steps", &balance.compare_steps, 0, OptionTable::kAny,
      "steps between comparisons, in which the same batch also runs in order at attention.budget, is timed and "
      "discarded: what balancing gains, measured. Costs one forward and backward; 0: never");
  table.path("balance.profile", &balance.profile,
             "latencies: a file that `sparsebalance profile` wrote, or h200 (measured: Qwen2.5-0.5B and 3B), "
             "h200-analytic, h100-analytic, a100-analytic, "
             "h20-analytic");
  table.path("balance.replay", &balance.replay,
             "plan.jsonl of another run, whose plans are used again: it must hold every step up to train.max_steps; "
             "empty: plans are made");
}

namespace {

void check_offload(const RunConfig& config, const OptionTable& table) {
  if (!config.train.offload_optimizer) return;
  const std::string label = table.label("train.offload_optimizer");
  SB_USER_CHECK(config.device == DeviceKind::cuda,
                "{}: on the CPU values and moments are in host memory anyway; leave it out, or set device: cuda",
                label);
  SB_USER_CHECK(config.dtype() == DType::bf16,
                "{}: with train.precision: float32 the operations read the values themselves, which stay on the GPU; "
                "leave one of them out",
                label);
}

void check_recompute(const RunConfig& config, const OptionTable& table) {
  if (config.train.recompute != Recompute::chunk) return;
  const std::string label = table.label("train.recompute");
  SB_USER_CHECK(
      config.balance.chunk > 0,
      "{}: chunk computes the forwards of pieces again, and no sequence is cut into pieces; set balance.chunk "
      "to their tokens, for example 8192, or train.recompute: layer",
      label);
  SB_USER_CHECK(
      config.parallel.pp == 1,
      "{}: chunk needs all pieces of a sequence to go back before the next one comes, and with parallel.pp {} "
      "stages others are between; set train.recompute: layer, or parallel.pp: 1",
      label, config.parallel.pp);
}

void check_chunk(const RunConfig& config, const OptionTable& table) {
  const int64_t chunk = config.balance.chunk;
  if (chunk == 0) return;
  const SelectionConfig& selection = config.attention.selection;
  const std::string label = table.label("balance.chunk");
  SB_USER_CHECK(selection.pattern != SelectionPattern::vertical_slash,
                "{}: pattern vertical_slash selects by the last queries of a sequence, which the first piece cannot "
                "know; use another pattern, or balance.chunk: none",
                label);
  SB_USER_CHECK(
      selection.pattern == SelectionPattern::dense || selection.order == SelectionOrder::causal,
      "{}: with attention.selection: lookahead later tokens decide what earlier ones see, and a piece does not "
      "know those after it; use selection: causal, or balance.chunk: none",
      label);
  SB_USER_CHECK(config.balance.tuning != TuningPolicy::anchor,
                "{}: tuning anchor evens out micro-batches, which pieces are already; use tuning: optimal or none, or "
                "balance.chunk: none",
                label);
  SB_USER_CHECK(config.parallel.cp == 1 || config.parallel.placement != ContextPlacement::zigzag,
                "{}: parallel.placement zigzag places blocks by the length of what it is given, and pieces are shorter "
                "than their sequence; use placement: triangular, or balance.chunk: none",
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
                "{}: is for tuning: anchor; remove it", table.label("balance.anchor"));
  SB_USER_CHECK(balance.p < 1, "{}: must be below 1: at 1 a sequence could lose all of its coverage",
                table.label("balance.p"));
  SB_USER_CHECK(balance.target < 0 || balance.tuning == TuningPolicy::optimal, "{}: is for tuning: optimal; remove it",
                table.label("balance.target"));
  SB_USER_CHECK(!tuned || selection.pattern == SelectionPattern::topk || selection.pattern == SelectionPattern::mass,
                "{}: needs an attention.pattern that follows a budget, topk or mass", table.label("balance.tuning"));
  SB_USER_CHECK(balance.max_budget == 0 || tuned || !balance.replay.empty(),
                "{}: is for balance.tuning and balance.replay; remove it", table.label("balance.max_budget"));
  SB_USER_CHECK(balance.max_budget == 0 || balance.max_budget >= selection.budget,
                "{}: {} is below attention.budget, {}, which tuning starts from", table.label("balance.max_budget"),
                balance.max_budget, selection.budget);
  // As the planner refuses it, which is made only when the run has begun.
  const int64_t least = (selection.sink_blocks + selection.local_blocks + 2) * selection.block;
  SB_USER_CHECK(!wants_balancing(balance) || selection.pattern == SelectionPattern::dense || selection.budget >= least,
                "{}: {} is below {} sink + {} local + 2 blocks of {} tokens = {}, which balancing needs; raise it or "
                "lower attention.block",
                table.label("attention.budget"), selection.budget, selection.sink_blocks, selection.local_blocks,
                selection.block, least);
  SB_USER_CHECK(!tuned || !balance.adapt || config.attention.coverage_rows > 0,
                "{}: 0 leaves tuning without measured coverage; raise it, or set balance.adapt: false to tune by the "
                "built-in curves",
                table.label("attention.coverage_rows"));
  SB_USER_CHECK(balance.compare_steps == 0 || tuned || balance.batching != BatchingPolicy::in_order ||
                    balance.ordering != BalanceOptions::Ordering::none || !balance.replay.empty(),
                "{}: nothing is balanced that could be compared; set balance.batching, or remove it",
                table.label("balance.compare_steps"));
  SB_USER_CHECK(
      balance.compare_steps == 0 || balance.chunk == 0,
      "{}: memory for whole sequences in order is not planned where balance.chunk cuts them; set one of them only",
      table.label("balance.compare_steps"));
  check_chunk(config, table);
  check_recompute(config, table);
  check_offload(config, table);
  const bool predicts = tuned || balance.chunk < 0 || balance.ordering != BalanceOptions::Ordering::none ||
                        balance.batching == BatchingPolicy::sab;
  SB_USER_CHECK(!predicts || !balance.profile.empty(),
                "{}: predicts latencies, and balance.profile does not say from what. Measure this machine once with "
                "`sparsebalance profile --run FILE` (FILE: this configuration) and set balance.profile: profile.json; "
                "or name a built-in profile, for example h200-analytic, which measured times then correct",
                table.label(tuned                                                ? "balance.tuning"
                            : balance.chunk < 0                                  ? "balance.chunk"
                            : balance.ordering != BalanceOptions::Ordering::none ? "balance.ordering"
                                                                                 : "balance.batching"));
}

}  // namespace sb
