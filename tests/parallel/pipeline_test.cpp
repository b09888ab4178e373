// What a stage of a pipeline does first.
#include "parallel/pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "comm/thread_communicator.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

using enum Pipeline::Pass;

constexpr int64_t kTokens = 24;

StageOptions stage_options(const ModelConfig& config, int stage) {
  StageOptions options = whole_model(config, kTokens);
  options.first_layer = stage;
  options.last_layer = stage + 1;
  options.slots = Pipeline::slots(stage, config.layers);
  if (stage > 0) options.split_backward_tokens = kTokens;
  return options;
}

ModelConfig two_layers() {
  ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  config.layers = 2;
  return config;
}

// The last stage does not finish its weights' gradients before the first stage has finished its whole backward. Where
// it kept the gradient that this one waits for until then, neither would come to an end.
TEST(Pipeline, TheInputsGradientLeavesBeforeTheWeightsGradientsAreThere) {
  const ModelConfig config = two_layers();
  const std::vector<MicroBatch> batches = {random_batch({20, 4}, config.vocab_size, 1)};
  std::promise<void> first_is_done;
  std::shared_future<void> done = first_is_done.get_future();
  run_thread_ranks(2, [&](Communicator& group) {
    NaiveAttention attention;
    TestExec run(1);
    Stage stage(config, stage_options(config, group.rank()), attention, 1);
    stage.initialize(3);
    stage.parameters().begin_gradients(run.exec);
    Pipeline pipeline(stage, group, kTokens);
    bool waited = false;
    const auto final = [&](int gradients) {
      if (group.rank() == 0 && gradients == 0) first_is_done.set_value();
      // The layer's own: those of the head come with the loss.
      if (group.rank() == 1 && gradients == 0)
        waited = done.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    };
    pipeline.train(run.exec, batches, {1, /*split_backward=*/true}, {final, {}});
    EXPECT_TRUE(group.rank() == 0 || waited);
  });
}

TEST(Pipeline, OperationsSayWhichHalfTheyAre) {
  const ModelConfig config = two_layers();
  const std::vector<MicroBatch> batches = {random_batch({20, 4}, config.vocab_size, 1),
                                           random_batch({9}, config.vocab_size, 2)};
  for (const bool split : {false, true})
    run_thread_ranks(2, [&](Communicator& group) {
      NaiveAttention attention;
      TestExec run(1);
      Stage stage(config, stage_options(config, group.rank()), attention, 1);
      stage.initialize(3);
      Pipeline pipeline(stage, group, kTokens);
      const Pipeline::Result result = pipeline.train(run.exec, batches, {1, split}, {});
      std::vector<std::pair<int, Pipeline::Pass>> seen, expected;
      for (const Pipeline::Operation& operation : result.operations) {
        seen.emplace_back(operation.micro_batch, operation.pass);
        EXPECT_LE(operation.begin, operation.end);
      }
      if (group.rank() == 0)
        expected = {{0, forward}, {1, forward}, {0, backward}, {1, backward}};
      else if (split)
        expected = {{0, forward}, {0, backward}, {0, weights}, {1, forward}, {1, backward}, {1, weights}};
      else
        expected = {{0, forward}, {0, backward}, {1, forward}, {1, backward}};
      EXPECT_EQ(seen, expected);
    });
}

}  // namespace
}  // namespace sb::test
