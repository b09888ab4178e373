// The same global batch on any grid, in any arrangement: the same loss and the same gradients.
#include "train/rank_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "comm/thread_communicator.h"
#include "core/random.h"
#include "parallel/ring/ring_attention.h"
#include "tests/model/model_fixture.h"
#include "tests/train/arranged_ranks.h"
#include "tests/train/replayed_attention.h"
#include "train/sums/step_sums.h"

namespace sb::test {
namespace {

constexpr int kBlock = 64;

struct Case {
  ModelConfig model;
  std::vector<std::vector<int32_t>> sequences;
  std::optional<SelectionConfig> selection;  // none: dense
  RecordedSelections* recorded = nullptr;    // sparse: selections of another run to use
  RecordedSelections* recording = nullptr;   // sparse: where this run's go
  int64_t chunk = 0;                         // sequences alone in a micro-batch come in pieces of so many tokens
  int ahead = 1;
  int64_t largest = 0;  // above 0: slots share the memory of micro-batches of so many tokens
  LoraConfig lora = {};
  int64_t layer_chunk = 32768;

  // As RunConfig has it.
  bool splits_backward(const GridShape& grid) const { return chunk > 0 && grid.tp == 1 && !lora.enabled(); }
};

struct Outcome {
  LossSums loss;
  double norm = 0;
  double density = 1;
  Tensors gradients;                       // of the whole model, by Hugging Face's names
  std::vector<std::vector<float>> values;  // of every rank, after one update
  Tensors weights, moments;                // what a checkpoint would hold, from all ranks
  Tensors exported;                        // the final model, on rank 0
};

RankModelOptions options_of(const Case& c, const GridShape& grid, Recompute recompute) {
  RankModelOptions options;
  options.model = c.model;
  options.first_layers = split_layers_evenly(c.model.layers, grid.pp);
  options.grid = grid;
  options.recompute = recompute;
  for (const auto& sequence : c.sequences) {
    options.max_micro_batch_tokens += std::ssize(sequence);
    options.max_sequence_length = std::max(options.max_sequence_length, std::ssize(sequence));
  }
  options.loss_chunk = 50;
  options.layer_chunk = c.layer_chunk;
  options.lora = c.lora;
  if (c.chunk > 0) options.max_pieces = static_cast<int>((options.max_sequence_length + c.chunk - 1) / c.chunk);
  if (c.splits_backward(grid)) options.split_backward_tokens = options.max_micro_batch_tokens;
  if (grid.cp > 1)
    options.max_cut_tokens = ContextLayout::most_sequence_tokens(grid.cp, kBlock, options.max_sequence_length);
  for (int stage = 0; c.largest > 0 && stage < grid.pp; ++stage)
    options.kept_tokens.push_back(Pipeline::slots(stage, grid.pp, options.max_pieces) * c.largest);
  return options;
}

RingAttention::Options ring_options(const Case& c) {
  RingAttention::Options options{{}, c.model.layers, ContextPlacement::triangular, 0};
  options.selection.pattern = SelectionPattern::dense;
  options.selection.block = kBlock;
  if (c.selection) options.selection = *c.selection;
  return options;
}

// B of every adapter, which starts at zero, so that the gradient of A is not.
void fill_second_factors(ParameterSet& parameters) {
  for (const FlatTensor& tensor : parameters.flat_tensors()) {
    if (tensor.name.find(".lora_B") == std::string::npos) continue;
    std::vector<float> whole(static_cast<size_t>(tensor.elements()));
    for (size_t e = 0; e < whole.size(); ++e)
      whole[e] = 0.01f * static_cast<float>((e * 37 + 11 * tensor.name.size()) % 41) - 0.2f;
    tensor.take_part(whole.data(), parameters.values().f32() + tensor.begin);
  }
}

Outcome run(const Case& c, const GridShape& grid, const Arrangement& arrangement,
            Recompute recompute = Recompute::attention) {
  const RankModelOptions options = options_of(c, grid, recompute);
  Outcome outcome;
  outcome.values.resize(static_cast<size_t>(grid.ranks()));
  std::mutex mutex;
  run_thread_ranks(grid.ranks(), [&](Communicator& world) {
    DenseAttention dense;
    std::optional<SparseAttention> sparse;
    if (c.selection) sparse.emplace(SparseAttention::Options{*c.selection, c.model.layers, 0});
    const GridPlace place = grid_place(grid, world.rank());
    const TensorShare share{grid.tp, place.tp};
    const auto sharing = world.split((place.dp * grid.pp + place.stage) * grid.tp + place.tp, place.cp, "cp");
    std::optional<RingAttention> ring;
    if (grid.cp > 1) ring.emplace(*sharing, ring_options(c));
    std::optional<ReplayedAttention> replayed;
    if (c.recorded && ring) replayed.emplace(*ring, *c.recorded, /*record=*/false, &RingAttention::index, share);
    if (c.recorded && !ring) replayed.emplace(*sparse, *c.recorded, /*record=*/false, &SparseAttention::index, share);
    if (c.recording) replayed.emplace(*sparse, *c.recording, /*record=*/true);
    Attention& attention = replayed ? static_cast<Attention&>(*replayed)
                           : ring   ? static_cast<Attention&>(*ring)
                           : sparse ? static_cast<Attention&>(*sparse)
                                    : static_cast<Attention&>(dense);
    RankModel model(options, attention, world);
    model.stage().initialize(7);
    fill_second_factors(model.stage().parameters());
    TestExec run(1);

    const std::vector<MicroBatch> batches = own_batches(model, arrangement, c.sequences, c.chunk);
    const Pipeline::Result result =
        model.forward_backward(run.exec, batches, {}, {c.ahead, /*split_backward=*/c.chunk > 0});
    EXPECT_EQ(result.operations.size(), (c.splits_backward(grid) && place.stage > 0 ? 3 : 2) * batches.size());
    const LossSums loss = sum_over_ranks(world, result.loss);
    const double norm = model.reduce(run.exec);

    const ModelLayout layout(c.model, options.first_layers, grid.dp * grid.cp, ModelLayout::kBucketElements, c.lora,
                             grid.tp);
    const TensorView gradients = model.stage().parameters().gradients();
    {
      std::lock_guard lock(mutex);
      add_own_gradients(model, layout, {gradients.f32(), gradients.f32() + gradients.elements()}, outcome.gradients);
      if (world.rank() == 0) {
        outcome.loss = loss;
        outcome.norm = norm;
        if (sparse) outcome.density = sparse->take_report().total().density();
      }
      EXPECT_EQ(outcome.norm == 0 ? norm : outcome.norm, norm);
    }
    model.update(run.exec, {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1.0f});
    const TensorView values = model.stage().parameters().values();
    outcome.values[static_cast<size_t>(world.rank())].assign(values.f32(), values.f32() + values.elements());

    // What a checkpoint would hold, and the final model.
    Tensors weights, moments, exported;
    add_own_tensors(model, weights, moments);
    for (const SafetensorsTensor& tensor : model.weights()) {
      const float* data = tensor.fetch();
      EXPECT_EQ(data != nullptr, world.rank() == 0);
      if (data != nullptr) exported[tensor.name].assign(data, data + tensor.elements());
    }
    std::lock_guard lock(mutex);
    outcome.weights.merge(weights);
    outcome.moments.merge(moments);
    EXPECT_TRUE(weights.empty() && moments.empty()) << "two ranks have the same tensor";
    if (world.rank() == 0) outcome.exported = std::move(exported);
  });
  EXPECT_TRUE(outcome.exported == outcome.weights);
  return outcome;
}

// All sequences dealt out to the ranks and packed at random, every rank with at least one.
Arrangement random_arrangement(int sequences, int dp, uint64_t seed) {
  Random random(seed);
  std::vector<int> order(static_cast<size_t>(sequences));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  Arrangement arrangement(static_cast<size_t>(dp));
  for (size_t i = 0; i < order.size(); ++i) {
    auto& rank = arrangement[i < static_cast<size_t>(dp) ? i : random.below(static_cast<uint64_t>(dp))];
    if (rank.empty() || random.below(3) > 0) rank.emplace_back();
    rank.back().push_back(order[i]);
  }
  return arrangement;
}

Case small_case(ModelConfig::Family family, bool tied, int layers) {
  Case c;
  c.model = tiny_config(family);
  c.model.layers = layers;
  c.model.tie_word_embeddings = tied;
  c.sequences = random_sequences({9, 1, 5, 30, 2, 17, 8, 21, 3, 12, 26}, c.model.vocab_size, 11);
  return c;
}

void expect_same(const Outcome& got, const Outcome& expected) {
  EXPECT_NEAR(got.loss.weighted, expected.loss.weighted, 1e-5 * expected.loss.weighted);
  EXPECT_NEAR(got.loss.nll, expected.loss.nll, 1e-5 * expected.loss.nll);
  EXPECT_EQ(got.loss.targets, expected.loss.targets);
  EXPECT_EQ(got.loss.correct, expected.loss.correct);
  EXPECT_NEAR(got.norm, expected.norm, 1e-5 * expected.norm);
  EXPECT_LT(largest_relative_difference(got.gradients, expected.gradients), 1e-5);
}

constexpr GridShape kGrids[] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {1, 3}, {2, 2}, {3, 2}, {2, 3}};

TEST(Ranks, AnyGridAndArrangementGivesTheSameGradients) {
  for (const bool tied : {true, false}) {
    const auto family = tied ? ModelConfig::Family::qwen2 : ModelConfig::Family::llama;
    const Case c = small_case(family, tied, 4);
    std::vector<int> all(c.sequences.size());
    std::iota(all.begin(), all.end(), 0);
    const Outcome reference = run(c, {1, 1}, {{all}}, Recompute::none);
    uint64_t seed = 0;
    for (const GridShape& grid : kGrids) {
      for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
        SCOPED_TRACE(
            fmt::format("tied {}, dp {}, pp {}, recompute {}", tied, grid.dp, grid.pp, static_cast<int>(recompute)));
        const Arrangement arrangement = random_arrangement(static_cast<int>(c.sequences.size()), grid.dp, ++seed);
        expect_same(run(c, grid, arrangement, recompute), reference);
      }
    }
  }
}

Case sparse_case() {
  Case c = small_case(ModelConfig::Family::qwen3, true, 3);
  c.model.head_dim = 16;
  c.model.max_position_embeddings = 1024;
  c.sequences = random_sequences({700, 90, 400, 333, 512, 64, 650}, c.model.vocab_size, 12);
  SelectionConfig selection;
  selection.pattern = SelectionPattern::topk;
  selection.block = kBlock;
  selection.budget = 256;
  selection.sink_blocks = 1;
  selection.local_blocks = 1;
  c.selection = selection;
  return c;
}

// The same micro-batches: forward computes the same bits wherever it runs, and so selects the same pairs.
TEST(Ranks, SparseAttentionSelectsTheSame) {
  const Case c = sparse_case();
  const Arrangement one = {{{0}, {1, 2}, {3}, {4, 5}, {6}}};
  const Outcome reference = run(c, {1, 1}, one);
  EXPECT_LT(reference.density, 0.8);
  const Arrangement reversed = {{{6}, {4, 5}, {3}, {1, 2}, {0}}}, two = {{{3}, {0}}, {{6}, {4, 5}, {1, 2}}};
  expect_same(run(c, {1, 1}, reversed), reference);
  expect_same(run(c, {2, 1}, two), reference);
  expect_same(run(c, {1, 3}, reversed), reference);
  expect_same(run(c, {2, 2}, two), reference);
}

TEST(Ranks, SparseAttentionWithReplayedSelectionsInAnyArrangement) {
  Case c = sparse_case();
  RecordedSelections selections;
  c.recording = &selections;
  const Outcome reference = run(c, {1, 1}, {{{0, 1, 2, 3, 4, 5, 6}}}, Recompute::none);
  EXPECT_LT(reference.density, 0.8);
  c.recording = nullptr;
  c.recorded = &selections;
  uint64_t seed = 0;
  for (const GridShape& grid : kGrids) {
    for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
      SCOPED_TRACE(fmt::format("dp {}, pp {}, recompute {}", grid.dp, grid.pp, static_cast<int>(recompute)));
      const Arrangement arrangement = random_arrangement(static_cast<int>(c.sequences.size()), grid.dp, ++seed);
      expect_same(run(c, grid, arrangement, recompute), reference);
    }
  }
}

// Long sequences in pieces, short ones packed beside them, in any order and however far forwards run ahead.
TEST(Ranks, SequencesInPiecesGiveTheGradientsOfWholeOnes) {
  Case c = sparse_case();
  // 700, 90, 400, 333, 512, 64 and 650 tokens.
  const std::vector<Arrangement> on_one = {{{{0}, {1, 5}, {2}, {3}, {4}, {6}}}, {{{1, 5}, {6}, {0}, {3}, {4}, {2}}}};
  const std::vector<Arrangement> on_two = {{{{0}, {3}, {1, 5}}, {{6}, {4}, {2}}},
                                           {{{1}, {4}, {2}, {0}}, {{6}, {3, 5}}}};
  const auto expect_pieces_same = [&](const Outcome& reference) {
    int number = 0;
    for (const GridShape& grid : std::initializer_list<GridShape>{{1, 1}, {2, 1}, {1, 2}, {1, 3}, {2, 2}, {2, 3}}) {
      for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
        const Arrangement& arrangement = (grid.dp == 1 ? on_one : on_two)[static_cast<size_t>(number % 2)];
        c.chunk = std::array{64, 128, 192, 448}[static_cast<size_t>(number % 4)];
        // As few forwards as possible, or as many as the longest sequence has pieces.
        c.ahead = number % 3 == 0 ? 1 : static_cast<int>((700 + c.chunk - 1) / c.chunk);
        c.largest = number % 2 == 0 ? 0 : 448;
        ++number;
        SCOPED_TRACE(fmt::format("dp {}, pp {}, recompute {}, chunk {}, ahead {}", grid.dp, grid.pp,
                                 static_cast<int>(recompute), c.chunk, c.ahead));
        expect_same(run(c, grid, arrangement, recompute), reference);
      }
    }
  };
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass,
                                         SelectionPattern::window, SelectionPattern::dense}) {
    SCOPED_TRACE(fmt::format("pattern {}", static_cast<int>(pattern)));
    c.selection->pattern = pattern;
    c.selection->coverage = 0.8;
    c.chunk = c.largest = 0;
    c.ahead = 1;
    RecordedSelections selections;
    c.recorded = nullptr;
    c.recording = &selections;
    const Outcome reference = run(c, {1, 1}, {{{0}, {1}, {2}, {3}, {4}, {5}, {6}}}, Recompute::none);
    if (pattern != SelectionPattern::dense) {
      EXPECT_LT(reference.density, 0.8);
    }
    c.recording = nullptr;
    c.recorded = &selections;
    expect_pieces_same(reference);
  }
  c.selection.reset();
  c.recorded = nullptr;
  c.chunk = c.largest = 0;
  c.ahead = 1;
  expect_pieces_same(run(c, {1, 1}, {{{0}, {1}, {2}, {3}, {4}, {5}, {6}}}, Recompute::none));
}

// Ranks that share the sequences, in pieces of which some ranks may hold nothing.
TEST(Ranks, SharedSequencesInPiecesGiveTheGradientsOfWholeOnes) {
  Case c = sparse_case();
  // 700, 90, 400, 333, 512, 64 and 650 tokens.
  const Arrangement alone = {{{0}, {1}, {2}, {3}, {4}, {5}, {6}}}, one = {{{0}, {1, 5}, {2}, {3}, {4}, {6}}},
                    two = {{{0}, {3}, {1, 5}}, {{6}, {4}, {2}}};
  int number = 0;
  for (const SelectionPattern pattern : {SelectionPattern::dense, SelectionPattern::topk, SelectionPattern::topp,
                                         SelectionPattern::mass, SelectionPattern::window}) {
    c.selection->pattern = pattern;
    c.selection->coverage = 0.8;
    c.chunk = 0;
    c.ahead = 1;
    RecordedSelections selections;
    c.recorded = nullptr;
    c.recording = &selections;
    const Outcome reference = run(c, {1, 1}, alone, Recompute::none);
    if (pattern != SelectionPattern::dense) {
      EXPECT_LT(reference.density, 0.8);
    }
    c.recording = nullptr;
    c.recorded = &selections;
    for (const auto& [grid, recompute] :
         std::initializer_list<std::pair<GridShape, Recompute>>{{{1, 1, 2}, Recompute::none},
                                                                {{1, 1, 2}, Recompute::chunk},
                                                                {{1, 2, 2}, Recompute::attention},
                                                                {{1, 2, 2}, Recompute::layer},
                                                                {{2, 1, 2}, Recompute::layer},
                                                                {{1, 1, 3}, Recompute::attention}}) {
      c.chunk = std::array{64, 192, 128, 448}[static_cast<size_t>(number++ % 4)];
      c.ahead = grid.pp == 1 ? 1 : static_cast<int>((700 + c.chunk - 1) / c.chunk);
      SCOPED_TRACE(fmt::format("pattern {}, dp {}, pp {}, cp {}, recompute {}, chunk {}", static_cast<int>(pattern),
                               grid.dp, grid.pp, grid.cp, static_cast<int>(recompute), c.chunk));
      expect_same(run(c, grid, grid.dp == 1 ? one : two, recompute), reference);
    }
  }
}

LoraConfig dropping_adapters(bool train_ends) {
  LoraConfig lora;
  lora.rank = 3;
  lora.alpha = 4;
  lora.dropout = 0.2;
  lora.norms = lora.embedding = train_ends;
  return lora;
}

// What adapters drop follows the sequences, wherever they run, in whatever pieces and how often.
TEST(Ranks, AdaptersWithDropoutGiveTheSameGradients) {
  for (const bool train_ends : {false, true}) {
    Case c = small_case(ModelConfig::Family::qwen2, /*tied=*/true, 4);
    c.lora = dropping_adapters(train_ends);
    const Outcome reference = run(c, {1, 1}, {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}}, Recompute::none);
    uint64_t seed = 0;
    for (const GridShape& grid : kGrids) {
      for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
        SCOPED_TRACE(fmt::format("train_ends {}, dp {}, pp {}, recompute {}", train_ends, grid.dp, grid.pp,
                                 static_cast<int>(recompute)));
        const Arrangement arrangement = random_arrangement(static_cast<int>(c.sequences.size()), grid.dp, ++seed);
        expect_same(run(c, grid, arrangement, recompute), reference);
      }
    }
    // Other elements are dropped in another order of the sequences.
    std::swap(c.sequences[0], c.sequences[3]);
    const Outcome other = run(c, {1, 1}, {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}}, Recompute::none);
    EXPECT_GT(std::abs(other.loss.weighted - reference.loss.weighted), 1e-5);
  }
}

TEST(Ranks, AdaptersOfSequencesInPiecesGiveTheGradientsOfWholeOnes) {
  Case c = sparse_case();
  c.selection.reset();
  c.lora = dropping_adapters(false);
  const Outcome reference = run(c, {1, 1}, {{{0}, {1}, {2}, {3}, {4}, {5}, {6}}}, Recompute::none);
  for (const GridShape& grid : std::initializer_list<GridShape>{{1, 1}, {1, 2}, {2, 2}}) {
    for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
      SCOPED_TRACE(fmt::format("dp {}, pp {}, recompute {}", grid.dp, grid.pp, static_cast<int>(recompute)));
      c.chunk = grid.pp == 2 ? 192 : 128;
      c.ahead = static_cast<int>((700 + c.chunk - 1) / c.chunk);
      const Arrangement arrangement = grid.dp == 1 ? Arrangement{{{0}, {1, 5}, {2}, {3}, {4}, {6}}}
                                                   : Arrangement{{{0}, {3}, {1, 5}}, {{6}, {4}, {2}}};
      expect_same(run(c, grid, arrangement, recompute), reference);
    }
  }
}

// Nothing replayed: the pieces' own selections are those of the whole sequences.
TEST(Ranks, SequencesInPiecesSelectTheSame) {
  Case c = sparse_case();
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::topp}) {
    c.selection->pattern = pattern;
    c.selection->coverage = 0.8;
    c.chunk = 0;
    c.ahead = 1;
    const Outcome reference = run(c, {1, 1}, {{{0}, {1, 5}, {2}, {3}, {4}, {6}}});
    c.chunk = 128;
    c.ahead = 6;
    for (const GridShape& grid : std::initializer_list<GridShape>{{1, 1}, {1, 2}}) {
      const Outcome got = run(c, grid, {{{0}, {1, 5}, {2}, {3}, {4}, {6}}});
      expect_same(got, reference);
      if (grid.pp == 1) {  // otherwise of the first stage's layers
        EXPECT_EQ(got.density, reference.density);
      }
    }
  }
}

// A model that four ranks can share; with two key/value heads, then, each head is on two of them. The vocabulary of 13
// has parts of three and four.
Case tensor_case(ModelConfig::Family family, bool tied, int kv_heads) {
  Case c = small_case(family, tied, 3);
  c.model.kv_heads = kv_heads;
  c.model.intermediate_size = 12;
  c.model.output_bias = family == ModelConfig::Family::llama;
  c.layer_chunk = 23;  // pieces of a micro-batch that do not divide by the ranks either
  return c;
}

std::string text_of(const GridShape& grid) {
  return fmt::format("dp {} pp {} cp {} tp {}", grid.dp, grid.pp, grid.cp, grid.tp);
}

TEST(TensorRanks, GiveTheSameLossAndGradients) {
  constexpr GridShape kTensorGrids[] = {{1, 1, 1, 2}, {1, 1, 1, 4}, {2, 1, 1, 2}, {1, 2, 1, 2}, {2, 2, 1, 2},
                                        {1, 3, 1, 4}, {1, 1, 2, 2}, {1, 2, 2, 2}, {2, 1, 2, 2}, {2, 1, 1, 4}};
  struct Model {
    ModelConfig::Family family;
    bool tied;
    int kv_heads;
  };
  uint64_t seed = 0;
  for (const Model& model : {Model{ModelConfig::Family::qwen2, true, 2}, Model{ModelConfig::Family::llama, false, 4},
                             Model{ModelConfig::Family::qwen3, false, 2}, Model{ModelConfig::Family::llama, true, 1}}) {
    const Case c = tensor_case(model.family, model.tied, model.kv_heads);
    const Outcome reference = run(c, {1, 1}, {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}}, Recompute::none);
    for (const GridShape& grid : kTensorGrids) {
      const auto recompute = static_cast<Recompute>(seed % 3);
      SCOPED_TRACE(fmt::format("family {}, tied {}, kv heads {}, {}, recompute {}", static_cast<int>(model.family),
                               model.tied, model.kv_heads, text_of(grid), static_cast<int>(recompute)));
      const Arrangement arrangement = random_arrangement(static_cast<int>(c.sequences.size()), grid.dp, ++seed);
      const Outcome got = run(c, grid, arrangement, recompute);
      expect_same(got, reference);
      // What a checkpoint would hold.
      EXPECT_LT(largest_relative_difference(got.moments, reference.moments), 2e-5);
      ASSERT_EQ(got.weights.size(), reference.weights.size());
      for (const auto& [name, values] : reference.weights) EXPECT_EQ(got.weights.at(name).size(), values.size());
    }
  }
}

TEST(TensorRanks, SelectAndComputeTheSamePairs) {
  Case c = sparse_case();
  c.model.heads = 8;
  c.model.kv_heads = 4;
  c.model.intermediate_size = 12;
  c.layer_chunk = 301;
  // 700, 90, 400, 333, 512, 64 and 650 tokens.
  const Arrangement one = {{{0}, {1, 2}, {3, 5}, {4}, {6}}}, two = {{{3}, {0}}, {{6}, {4, 5}, {1, 2}}};
  const std::pair<GridShape, Recompute> kRuns[] = {{{1, 1, 1, 2}, Recompute::none},
                                                   {{1, 1, 1, 4}, Recompute::layer},
                                                   {{1, 2, 1, 2}, Recompute::attention},
                                                   {{2, 1, 1, 2}, Recompute::attention},
                                                   {{1, 1, 2, 2}, Recompute::layer}};
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass,
                                         SelectionPattern::window, SelectionPattern::vertical_slash}) {
    c.selection->pattern = pattern;
    c.selection->coverage = 0.8;
    const bool ahead = pattern == SelectionPattern::vertical_slash;
    c.selection->order = ahead ? SelectionOrder::lookahead : SelectionOrder::causal;
    c.selection->vertical_cap = 128;
    c.selection->slash_cap = 4;
    RecordedSelections selections;
    c.recorded = nullptr;
    c.recording = &selections;
    const Outcome reference = run(c, {1, 1}, one, Recompute::none);
    EXPECT_LT(reference.density, 0.9);
    c.recording = nullptr;
    c.recorded = ahead ? nullptr : &selections;  // columns are selected, too, and not recorded
    for (const auto& [grid, recompute] : kRuns) {
      SCOPED_TRACE(fmt::format("pattern {}, {}", static_cast<int>(pattern), text_of(grid)));
      expect_same(run(c, grid, grid.dp == 1 ? one : two, recompute), reference);
      // In pieces, shared by the cp ranks or not.
      if (ahead || recompute != Recompute::layer) continue;
      c.chunk = 128;
      expect_same(run(c, grid, one, Recompute::layer), reference);
      expect_same(run(c, grid, one, Recompute::chunk), reference);
      c.chunk = 0;
    }
  }
}

TEST(TensorRanks, AdaptersWithDropoutGiveTheSameGradients) {
  for (const bool train_ends : {false, true}) {
    Case c = tensor_case(ModelConfig::Family::qwen2, /*tied=*/true, 2);
    c.lora = dropping_adapters(train_ends);
    const Outcome reference = run(c, {1, 1}, {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}}, Recompute::none);
    uint64_t seed = 0;
    for (const GridShape& grid : {GridShape{1, 1, 1, 2}, GridShape{1, 1, 1, 4}, GridShape{2, 2, 1, 2}}) {
      SCOPED_TRACE(fmt::format("train_ends {}, {}", train_ends, text_of(grid)));
      const auto recompute = static_cast<Recompute>(seed % 3);
      const Arrangement arrangement = random_arrangement(static_cast<int>(c.sequences.size()), grid.dp, ++seed);
      expect_same(run(c, grid, arrangement, recompute), reference);
    }
  }
}

TEST(Ranks, CopiesAreBitEqualAfterAnUpdateAndCollectedOnce) {
  for (const bool tied : {true, false}) {
    const Case c = small_case(ModelConfig::Family::qwen2, tied, 3);
    const GridShape grid{3, 2};
    const Arrangement arrangement = random_arrangement(static_cast<int>(c.sequences.size()), grid.dp, 5);
    const Outcome outcome = run(c, grid, arrangement);
    for (int dp = 1; dp < grid.dp; ++dp)
      for (int stage = 0; stage < grid.pp; ++stage)
        EXPECT_EQ(outcome.values[static_cast<size_t>(dp * grid.pp + stage)],
                  outcome.values[static_cast<size_t>(stage)]);
    const Tensors& weights = outcome.weights;
    const Outcome alone = run(c, {1, 1}, {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}});
    ASSERT_EQ(weights.size(), alone.weights.size());
    for (const auto& [name, values] : alone.weights) EXPECT_EQ(weights.at(name).size(), values.size()) << name;
    EXPECT_LT(largest_relative_difference(outcome.moments, alone.moments), 2e-5);
    if (!tied) continue;
    const std::vector<float>& embedding = weights.at("model.embed_tokens.weight");
    const std::vector<float>& first = outcome.values[0];
    EXPECT_TRUE(std::equal(embedding.begin(), embedding.end(), first.begin()));
    // On the last stage it comes at the end.
    RankModelOptions options = options_of(c, grid, Recompute::none);
    const ParameterSet last = Stage::declare_parameters(c.model, options.stage(1));
    EXPECT_TRUE(std::equal(embedding.begin(), embedding.end(), outcome.values[1].begin() + last.groups().back().begin));
  }
}

// The first stage never runs backward in halves, and no stage does where all sequences come whole.
TEST(Ranks, MemoryForWaitingGradientsIsWhereSequencesAreCut) {
  Case c = small_case(ModelConfig::Family::qwen2, true, 4);
  const DenseAttention attention;
  for (const auto& [chunk, stage, waits] : {std::tuple{16, 0, false}, {16, 1, true}, {30, 1, false}}) {
    c.chunk = chunk;
    const MemoryPlan plan = RankModel::memory_plan(options_of(c, {1, 2}, Recompute::attention), attention, stage);
    EXPECT_EQ(std::ranges::count(plan.items(), "waiting gradients", &MemoryPlan::Item::name), waits)
        << "pieces of " << chunk << ", stage " << stage;
  }
}

TEST(Ranks, OptimizerMemoryFallsWithTheRanks) {
  const Case c = small_case(ModelConfig::Family::qwen2, true, 4);
  const DenseAttention attention;
  std::map<int, int64_t> optimizer, weights;
  for (const int dp : {1, 2, 4}) {
    const MemoryPlan plan = RankModel::memory_plan(options_of(c, {dp, 1}, Recompute::none), attention, 0);
    for (const MemoryPlan::Item& item : plan.items()) {
      if (item.name == "optimizer") optimizer[dp] = item.bytes;
      if (item.name == "weights") weights[dp] = item.bytes;
    }
    EXPECT_EQ(optimizer[dp], 2 * weights[dp] / dp) << dp;
  }
  // Padding to equal pieces is all that weights may grow by.
  EXPECT_LE(weights[4], weights[1] + 6 * 3 * 64);
}

}  // namespace
}  // namespace sb::test
