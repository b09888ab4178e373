// Codes of weights that outlive a micro-batch, through the steps of ranks: what updates them, and that nothing depends
// on whether they are kept.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "attention/cpu/dense_attention.h"
#include "comm/thread_communicator.h"
#include "tests/train/arranged_ranks.h"
#include "train/sums/step_sums.h"

namespace sb::test {
namespace {

constexpr int kSteps = 3;

ModelConfig wide_model() {
  ModelConfig model = tiny_config(ModelConfig::Family::qwen3);
  model.hidden_size = model.intermediate_size = 32;
  model.head_dim = 16;
  model.layers = 4;
  model.max_position_embeddings = 256;
  return model;
}

struct Fp8Outcome {
  std::vector<double> losses, evaluated;        // of every step, and before and after each
  std::map<int, std::vector<float>> gradients;  // of every rank in the last step
  bool operator==(const Fp8Outcome&) const = default;
};

struct Fp8Case {
  GridShape grid;
  Arrangement arrangement;
  Recompute recompute = Recompute::attention;
  int64_t chunk = 0;  // tokens of a piece; 0: sequences come whole
};

// `kept_codes`: of every stage.
Fp8Outcome train(const Fp8Case& c, const std::vector<int>& kept_codes) {
  const auto sequences = random_sequences({70, 9, 150, 17}, wide_model().vocab_size, 11);
  RankModelOptions options;
  options.model = wide_model();
  options.first_layers = split_layers_evenly(options.model.layers, c.grid.pp);
  options.grid = c.grid;
  options.recompute = c.recompute;
  options.max_micro_batch_tokens = 246;
  options.max_sequence_length = 150;
  if (c.chunk > 0) options.max_pieces = static_cast<int>((150 + c.chunk - 1) / c.chunk);
  options.fp8 = true;
  options.fp8_skip = {2};
  options.kept_codes = kept_codes;
  Fp8Outcome outcome;
  std::mutex mutex;
  run_thread_ranks(c.grid.ranks(), [&](Communicator& world) {
    DenseAttention attention;
    RankModel model(options, attention, world);
    TestExec exec(1);
    const std::vector<MicroBatch> batches = own_batches(model, c.arrangement, sequences, c.chunk);
    const MicroBatch validation = pack(sequences, count_targets(sequences));
    const auto evaluate = [&] {
      const double loss = sum_over_ranks(world, model.evaluate(exec.exec, validation)).weighted;
      if (world.rank() == 0) outcome.evaluated.push_back(loss);
    };
    model.stage().initialize(7);
    evaluate();
    for (int step = 1; step <= kSteps; ++step) {
      const Pipeline::Result result = model.forward_backward(exec.exec, batches, {});
      const double loss = sum_over_ranks(world, result.loss).weighted;
      if (world.rank() == 0) outcome.losses.push_back(loss);
      model.reduce(exec.exec);
      model.update(exec.exec, {3e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1.0f});
      evaluate();
    }
    const TensorView gradients = model.stage().parameters().gradients();
    {
      std::lock_guard lock(mutex);
      outcome.gradients[world.rank()].assign(gradients.f32(), gradients.f32() + gradients.elements());
    }
    model.stage().initialize(8);  // as loading does it
    evaluate();
  });
  return outcome;
}

TEST(Fp8Ranks, KeptCodesFollowEveryUpdate) {
  const Arrangement one = {{{0, 1}, {2}, {3}}}, two = {{{0}, {1, 3}}, {{2}}};
  const std::vector<Fp8Case> cases = {{{1, 1}, one},
                                      {{1, 1}, one, Recompute::chunk, 64},
                                      {{2, 1}, two, Recompute::layer},
                                      {{1, 2}, one, Recompute::layer, 64},
                                      {{2, 2}, two, Recompute::none}};
  for (const Fp8Case& c : cases) {
    SCOPED_TRACE(fmt::format("dp {}, pp {}, chunk {}", c.grid.dp, c.grid.pp, c.chunk));
    const auto stages = static_cast<size_t>(c.grid.pp);
    const Fp8Outcome made = train(c, std::vector<int>(stages, 0));
    ASSERT_EQ(made.losses.size(), size_t{kSteps});
    EXPECT_LT(made.losses.back(), made.losses.front());
    for (const std::vector<int>& kept : {std::vector<int>(), std::vector<int>(stages, 1)})
      EXPECT_TRUE(train(c, kept) == made) << (kept.empty() ? "all" : "one layer of a stage");
  }
}

}  // namespace
}  // namespace sb::test
