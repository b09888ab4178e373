// How much attention mass each way of choosing key blocks keeps, on the queries and keys of a trained model and at the
// same number of computed pairs:
//   bench_coverage MODEL [TOKENS [BUDGET [SEQUENCES [ROWS]]]]
// MODEL is a Hugging Face directory, for example runs/quickstart/final. The model reads chunk-recall sequences with
// dense attention; what it would have kept is computed from the full softmax of sampled rows. The table stands at the
// end, in Markdown. ROWS: only those whose name has this in it.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "attention/forwarding_attention.h"
#include "core/errors.h"
#include "core/random.h"
#include "data/synthetic/synthetic.h"
#include "device/blas.h"
#include "model/hf_checkpoint.h"
#include "model/stage/stage.h"
#include "train/packing.h"

namespace {

using namespace sb;

constexpr int kBlock = 64;
constexpr int64_t kSampledRows = 1024;

// What attention was asked in one layer of one sequence.
struct Recorded {
  int layer;
  AttentionShape shape;
  int64_t tokens;
  std::vector<float> q, k, v;
};

// Keeps the operands of the attention it passes on to.
class RecordingAttention final : public ForwardingAttention {
 public:
  using ForwardingAttention::ForwardingAttention;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    const int64_t tokens = sequences.tokens(), queries = tokens * shape.heads * shape.head_dim,
                  keys = tokens * shape.kv_heads * shape.head_dim;
    const auto copy = [](const TensorView& x, int64_t count) { return std::vector<float>(x.f32(), x.f32() + count); };
    recorded.push_back(
        {layer, shape, tokens, copy(operands.q, queries), copy(operands.k, keys), copy(operands.v, keys)});
  }
  std::vector<Recorded> recorded;
};

std::vector<Recorded> record(const std::filesystem::path& directory, const std::vector<TokenSequence>& sequences,
                             int64_t tokens, ThreadPool& pool, const ModelConfig& config) {
  DenseAttention dense;
  RecordingAttention attention(dense);
  StageOptions options;
  options.last_layer = config.layers;
  options.max_micro_batch_tokens = options.max_sequence_length = tokens;
  options.training = false;
  Stage stage(config, options, attention, pool.threads());
  read_hf_weights(directory, stage.parameters());
  LossSums sums;
  const std::array chosen{0};
  const std::array weight{1.0f};
  for (const TokenSequence& sequence : sequences) {
    const MicroBatch batch = make_micro_batch({&sequence, 1}, chosen, weight, config.vocab_size);
    Exec exec;
    exec.pool = &pool;
    stage.forward(exec, batch, 0, {});
    sums.correct += stage.loss(0).correct;
    sums.targets += stage.loss(0).targets;
  }
  fmt::print("{}: {:.1f} % of the targets right, dense, {} sequences of {} tokens\n\n", directory.string(),
             100.0 * static_cast<double>(sums.correct) / static_cast<double>(sums.targets), sequences.size(), tokens);
  return std::move(attention.recorded);
}

// Full softmax of the sampled rows: [rows, heads, tokens], zero after the row's own token.
std::vector<float> attention_probabilities(const Recorded& one, const std::vector<int64_t>& rows) {
  const AttentionShape& shape = one.shape;
  std::vector<float> all(rows.size() * shape.heads * one.tokens, 0.0f);
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t keys = rows[r] + 1;
    for (int h = 0; h < shape.heads; ++h) {
      float* p = all.data() + (r * shape.heads + h) * one.tokens;
      sgemm({.transpose_b = true,
             .m = 1,
             .n = keys,
             .k = shape.head_dim,
             .a = one.q.data() + (rows[r] * shape.heads + h) * shape.head_dim,
             .lda = shape.head_dim,
             .b = one.k.data() + int64_t{h / shape.group()} * shape.head_dim,
             .ldb = int64_t{shape.kv_heads} * shape.head_dim,
             .c = p,
             .ldc = keys});
      const float top = *std::max_element(p, p + keys);
      double sum = 0;
      for (int64_t m = 0; m < keys; ++m) sum += p[m] = std::exp(shape.scale * (p[m] - top));
      for (int64_t m = 0; m < keys; ++m) p[m] = static_cast<float>(p[m] / sum);
    }
  }
  return all;
}

// Mass that the lists let one token see in one head.
double held_mass(const BlockIndex& index, const Recorded& one, const float* p, int head, int64_t token) {
  const BlockIndexShape& lists = index.shape();
  const BlockIndex::Sequence& sequence = index.sequences()[0];
  const int list_head = lists.list_heads == one.shape.heads ? head : head / one.shape.group();
  const int64_t tile = token / lists.query_block, row_in_tile = token - tile * lists.query_block;
  const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, list_head, static_cast<int>(tile)));
  double held = 0;
  for (size_t i = 0; i < row.blocks.size(); ++i) {
    if (row.first[i] > row_in_tile) continue;
    const int64_t begin = int64_t{row.blocks[i]} * lists.block, end = std::min(token + 1, begin + lists.block);
    for (int64_t m = begin; m < end; ++m) held += p[m];
  }
  for (const int32_t column : row.columns) held += column <= token ? p[column] : 0.0f;
  return held;
}

struct Setting {
  std::string name;
  SelectionConfig selection;
};

std::vector<Setting> settings(int64_t budget) {
  SelectionConfig base;
  base.block = kBlock;
  base.budget = budget;
  base.dense_below = 0;
  std::vector<Setting> all;
  const auto add = [&](const std::string& name, SelectionPattern pattern, SelectionOrder order, BlockScore score,
                       int query_block, int step, int score_tokens = 0) {
    Setting setting{name, base};
    setting.selection.score_tokens = score_tokens;
    setting.selection.pattern = pattern;
    setting.selection.order = order;
    setting.selection.score = score;
    setting.selection.query_block = query_block;
    setting.selection.step = step;
    all.push_back(setting);
  };
  for (const BlockScore score : {BlockScore::moments, BlockScore::mean}) {
    const std::string by = score == BlockScore::moments ? "moments" : "mean";
    const auto causal = SelectionOrder::causal, lookahead = SelectionOrder::lookahead;
    add("topk | every token | " + by + " | 1 | –", SelectionPattern::topk, causal, score, 1, 1);
    for (const int query_block : {2, 16, 128}) {
      for (const int step : {1, 2}) {
        if (query_block == 2 && step == 2) continue;  // one later token: nothing to spread
        add(fmt::format("topk | causal | {} | {} | {}", by, query_block, step), SelectionPattern::topk, causal, score,
            query_block, step);
      }
      add(fmt::format("topk | lookahead | {} | {} | –", by, query_block), SelectionPattern::topk, lookahead, score,
          query_block, 1);
    }
    add("mass | causal | " + by + " | 16 | 1", SelectionPattern::mass, causal, score, 16, 1);
    add("mass | lookahead | " + by + " | 16 | –", SelectionPattern::mass, lookahead, score, 16, 1);
    add("topp | causal | " + by + " | 16 | 1", SelectionPattern::topp, causal, score, 16, 1);
  }
  // Parts of blocks: with single keys the estimate is exact, which is the most that choosing whole blocks can reach.
  for (const BlockScore score : {BlockScore::moments, BlockScore::mean}) {
    for (const int part : {1, 2, 4, 8, 16}) {
      if (part == 1 && score == BlockScore::mean) continue;  // a single key has no variance
      const std::string by =
          part == 1 ? "parts of 1"
                    : fmt::format("{}, parts of {}", score == BlockScore::moments ? "moments" : "mean", part);
      add(fmt::format("topk | causal | {} | 16 | 1", by), SelectionPattern::topk, SelectionOrder::causal, score, 16, 1,
          part);
      if (part == 1 || part == 4) {
        add(fmt::format("topk | every token | {} | 1 | –", by), SelectionPattern::topk, SelectionOrder::causal, score,
            1, 1, part);
        add(fmt::format("topk | lookahead | {} | 16 | –", by), SelectionPattern::topk, SelectionOrder::lookahead, score,
            16, 1, part);
      }
      if (part == 1) {
        add("mass | causal | parts of 1 | 16 | 1", SelectionPattern::mass, SelectionOrder::causal, score, 16, 1, part);
        add("topp | causal | parts of 1 | 16 | 1", SelectionPattern::topp, SelectionOrder::causal, score, 16, 1, part);
      }
    }
  }
  add("vertical_slash | lookahead | last queries | 64 | –", SelectionPattern::vertical_slash, SelectionOrder::lookahead,
      BlockScore::moments, 64, 1);
  // Half of the pairs for columns, half for diagonals; the coverages never bind.
  all.back().selection.vertical_coverage = all.back().selection.slash_coverage = 1.0;
  all.back().selection.vertical_cap = budget / 2;
  all.back().selection.slash_cap = std::max<int64_t>(1, budget / 2 / kBlock);
  add("window | – | – | 16 | –", SelectionPattern::window, SelectionOrder::causal, BlockScore::moments, 16, 1);
  return all;
}

struct Outcome {
  double pairs = 0, causal_pairs = 0;  // (query, key), a list head
  std::vector<double> layer_coverage;  // over all sampled rows
  double recall_coverage = 0;          // in the last layer, rows whose label counts
};

class Measurement {
 public:
  Measurement(std::vector<Recorded> recorded, std::vector<TokenSequence> sequences, int layers, ThreadPool& pool)
      : recorded_(std::move(recorded)), sequences_(std::move(sequences)), layers_(layers), pool_(pool) {
    const int64_t tokens = recorded_.front().tokens;
    Random random(7);
    rows_.resize(tokens);
    std::iota(rows_.begin(), rows_.end(), int64_t{0});
    for (int64_t i = 0; i < std::min(tokens, kSampledRows); ++i) {
      std::swap(rows_[i], rows_[i + static_cast<int64_t>(random.below(static_cast<uint64_t>(tokens - i)))]);
    }
    rows_.resize(std::min(tokens, kSampledRows));
    for (const Recorded& one : recorded_) probabilities_.push_back(attention_probabilities(one, rows_));
  }

  // Chooses for everything that was recorded with this budget. `coverage`: measures it too.
  Outcome run(SparseAttention& attention, int64_t budget, bool coverage) {
    Outcome outcome;
    outcome.layer_coverage.assign(layers_, 0.0);
    std::vector<double> layer_rows(layers_, 0.0);
    double recall_rows = 0;
    for (size_t i = 0; i < recorded_.size(); ++i) {
      Recorded& one = recorded_[i];
      const BlockIndex& index = choose(attention, one, budget);
      outcome.pairs += static_cast<double>(index.token_pairs()) / index.shape().list_heads;
      outcome.causal_pairs += static_cast<double>(index.causal_token_pairs()) / index.shape().list_heads;
      if (!coverage) continue;
      const std::vector<int32_t>& labels = sequences_[i / layers_].labels;
      for (size_t r = 0; r < rows_.size(); ++r) {
        for (int h = 0; h < one.shape.heads; ++h) {
          const float* p = probabilities_[i].data() + (r * one.shape.heads + h) * one.tokens;
          const double held = held_mass(index, one, p, h, rows_[r]);
          outcome.layer_coverage[one.layer] += held;
          ++layer_rows[one.layer];
          if (one.layer != layers_ - 1 || labels[rows_[r]] == kIgnoredLabel) continue;
          outcome.recall_coverage += held;
          ++recall_rows;
        }
      }
    }
    for (int l = 0; l < layers_; ++l) outcome.layer_coverage[l] /= std::max(1.0, layer_rows[l]);
    outcome.recall_coverage /= std::max(1.0, recall_rows);
    return outcome;
  }

 private:
  const BlockIndex& choose(SparseAttention& attention, Recorded& one, int64_t budget) {
    const AttentionShape& shape = one.shape;
    out_.resize(one.q.size());
    lse_.resize(one.tokens * shape.heads);
    const auto queries = [&](std::vector<float>& x) {
      return TensorView{x.data(), {one.tokens, shape.heads, shape.head_dim}};
    };
    const auto keys = [&](std::vector<float>& x) {
      return TensorView{x.data(), {one.tokens, shape.kv_heads, shape.head_dim}};
    };
    Arena scratch("scratch", attention.scratch_bytes(shape, one.tokens, pool_.threads()));
    const Exec exec{DeviceKind::cpu, &pool_, nullptr, &scratch};
    const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(one.tokens)};
    const std::vector<int32_t> budgets = {static_cast<int32_t>(budget)};
    state_ = attention.make_state();
    attention.forward(
        exec, one.layer, shape, {cu_seqlens, budgets},
        {queries(one.q), keys(one.k), keys(one.v), queries(out_), {lse_.data(), {shape.heads, one.tokens}}}, *state_,
        false);
    return SparseAttention::index(*state_);
  }

  std::vector<Recorded> recorded_;
  std::vector<TokenSequence> sequences_;
  int layers_;
  ThreadPool& pool_;
  std::vector<int64_t> rows_;
  std::vector<std::vector<float>> probabilities_;
  std::vector<float> out_, lse_;
  std::unique_ptr<AttentionState> state_;
};

// `mass` learns its thresholds from step to step: as many as it takes until they stay.
void settle(Measurement& measurement, SparseAttention& attention, int64_t budget) {
  LearnedSelection learned;
  attention.take_observations();
  for (int step = 0; step < 12; ++step) {
    attention.use(learned);
    measurement.run(attention, budget, false);
    learned = learn(learned, attention.take_observations());
  }
  attention.use(learned);
}

// The budget with which a setting computes as many pairs as wanted.
int64_t calibrate(Measurement& measurement, SparseAttention& attention, bool learns, double wanted, int64_t most) {
  int64_t low = kBlock, high = most;
  while (high - low > kBlock / 8) {
    const int64_t middle = (low + high) / 2;
    if (learns) settle(measurement, attention, middle);
    (measurement.run(attention, middle, false).pairs > wanted ? high : low) = middle;
  }
  return low;
}

void run(const std::filesystem::path& directory, int64_t tokens, int64_t budget, int64_t count,
         const std::string& rows) {
  const ModelConfig config = read_model_config(directory / "config.json");
  SB_USER_CHECK(budget >= 8 * kBlock && budget <= tokens / 2 && count >= 1,
                "a budget of {} for {} sequences of {} tokens; at least {} and at most half of the tokens make sense",
                budget, count, tokens, 8 * kBlock);
  ThreadPool pool(available_cores());
  SyntheticOptions task;
  task.vocab_size = config.vocab_size;
  task.length = LengthDistribution::fixed(tokens);
  const auto source = make_synthetic_source(task, /*seed=*/4711);
  std::vector<TokenSequence> sequences;
  for (int64_t i = 0; i < count; ++i) sequences.push_back(source->read(static_cast<uint64_t>(i)));
  std::vector<Recorded> recorded = record(directory, sequences, tokens, pool, config);
  Measurement measurement(std::move(recorded), std::move(sequences), config.layers, pool);

  const std::vector<Setting> all = settings(budget);
  const auto open = [&](const Setting& setting) {
    return SparseAttention({setting.selection, config.layers, /*coverage_rows=*/0});
  };
  // As many pairs as whole lists of the budget have, for all. The staircase has fewer with the same budget, since early
  // tokens of a query block do not see (nor compute) what later ones add; it gets a larger one here.
  const auto reference = std::find_if(all.begin(), all.end(), [](const Setting& setting) {
    return setting.name == "topk | lookahead | moments | 16 | –";
  });
  SparseAttention whole_lists = open(*reference);
  const double wanted = measurement.run(whole_lists, budget, false).pairs;

  std::string layers, rule;
  for (int l = 0; l < config.layers; ++l) {
    layers += fmt::format(" layer {} |", l);
    rule += " --- |";
  }
  fmt::print("| pattern | selection | score | query block | step | budget | pairs |{} {} |\n", layers,
             "recalling tokens, last layer");
  fmt::print("| --- | --- | --- | --- | --- | ---: | ---: |{} --- |\n", rule);
  for (const Setting& setting : all) {
    if (setting.name.find(rows) == std::string::npos) continue;
    SparseAttention attention = open(setting);
    const bool learns = setting.selection.learns_thresholds();
    const int64_t chosen = calibrate(measurement, attention, learns, wanted, std::min(4 * budget, tokens - 1));
    if (learns) settle(measurement, attention, chosen);
    const Outcome outcome = measurement.run(attention, chosen, true);
    std::string columns;
    for (const double coverage : outcome.layer_coverage) columns += fmt::format(" {:.1f} % |", 100 * coverage);
    fmt::print("| {} | {} | {:.1f} % |{} {:.1f} % |\n", setting.name, chosen,
               100 * outcome.pairs / outcome.causal_pairs, columns, 100 * outcome.recall_coverage);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: bench_coverage MODEL [TOKENS [BUDGET [SEQUENCES [ROWS]]]]\n");
    return 2;
  }
  const auto number = [&](int i, int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  try {
    const int64_t tokens = number(2, 2048);
    run(argv[1], tokens, number(3, tokens / 4), number(4, 2), argc > 5 ? argv[5] : "");
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_coverage: {}\n", error.what());
    return 1;
  }
  return 0;
}
