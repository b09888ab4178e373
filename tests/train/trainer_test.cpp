#include "train/trainer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "attention/forwarding_attention.h"
#include "model/hf_checkpoint.h"
#include "tests/model/model_fixture.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

double norm(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum);
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> difference(a.size());
  for (size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return norm(difference) / norm(b);
}

std::vector<nlohmann::json> metrics_of(const fs::path& run) {
  std::istringstream in(read_bytes(run / "metrics.jsonl"));
  std::vector<nlohmann::json> result;
  std::string line;
  while (std::getline(in, line)) result.push_back(nlohmann::json::parse(line));
  return result;
}

std::string bytes_of_final_weights(const fs::path& run) {
  return read_bytes(run / "final" / "model.safetensors");
}

struct OneStep {
  double loss, grad_norm;
  std::vector<float> gradients;
};

OneStep one_step(const std::vector<std::string>& overrides, SequenceSource* source = nullptr) {
  ScratchDirectory scratch;
  TinyTrainer trainer(tiny_run(scratch / "run", overrides), {nullptr, source, [] { return false; }});
  EXPECT_TRUE(trainer->step());
  return {trainer->last_step().loss, trainer->last_step().grad_norm, gradients_of(*trainer)};
}

// Any way to cut a global batch into micro-batches gives the same loss and gradient, but for the order of fp32 sums.
TEST(Trainer, PackingChangesNothing) {
  for (const char* loss : {"batch.loss=token_mean", "batch.loss=sequence_mean"}) {
    const OneStep reference = one_step({loss, "batch.global_batch_size=9", "batch.micro_batch_sequences=1"});
    for (const auto& packing : std::vector<std::vector<std::string>>{
             {"batch.micro_batch_sequences=2"},
             {"batch.micro_batch_sequences=9"},
             {"batch.micro_batch_sequences=0", "batch.micro_batch_tokens=120"},
             {"batch.micro_batch_sequences=4", "batch.micro_batch_tokens=100"},
             {"batch.micro_batch_sequences=3", "train.recompute=none", "train.loss_chunk=7", "train.layer_chunk=13"},
             {"batch.micro_batch_sequences=3", "train.recompute=layer", "train.threads=1"}}) {
      std::vector<std::string> overrides = {loss, "batch.global_batch_size=9"};
      overrides.insert(overrides.end(), packing.begin(), packing.end());
      const OneStep got = one_step(overrides);
      EXPECT_NEAR(got.loss, reference.loss, 2e-6 * reference.loss) << packing[0];
      EXPECT_LT(relative_difference(got.gradients, reference.gradients), 2e-6) << packing[0];
    }
  }
}

std::vector<TokenSequence> some_sequences() {
  std::vector<TokenSequence> sequences;
  for (int64_t id = 0; id < 4; ++id) {
    TokenSequence sequence;
    sequence.id = 1000 + id;
    const int64_t length = 5 + 9 * id;
    for (int64_t i = 0; i < length; ++i) sequence.tokens.push_back(static_cast<int32_t>((i * i + 3 * id) % 16));
    sequence.labels.assign(sequence.tokens.begin() + 1, sequence.tokens.end());
    sequence.labels.push_back(kIgnoredLabel);
    sequence.labels[static_cast<size_t>(id)] = kIgnoredLabel;
    sequences.push_back(sequence);
  }
  return sequences;
}

TEST(Trainer, TheOrderInsideAGlobalBatchChangesNothing) {
  std::vector<TokenSequence> sequences = some_sequences();
  ListSource forwards(sequences);
  std::reverse(sequences.begin(), sequences.end());
  std::swap(sequences[0], sequences[1]);
  ListSource shuffled(sequences);
  const OneStep a = one_step({}, &forwards), b = one_step({}, &shuffled);
  EXPECT_NEAR(a.loss, b.loss, 2e-6 * a.loss);
  EXPECT_LT(relative_difference(a.gradients, b.gradients), 2e-6);
}

TEST(Trainer, BothLossesMeetTheirDefinition) {
  const std::vector<TokenSequence> sequences = some_sequences();
  double nll_sum = 0, mean_sum = 0;
  int64_t targets = 0;
  for (const TokenSequence& sequence : sequences) {
    // A global batch of this sequence alone: both losses are its mean.
    ListSource alone({sequence});
    const double mean = one_step({"batch.global_batch_size=1", "batch.micro_batch_sequences=1"}, &alone).loss;
    nll_sum += mean * static_cast<double>(alone.valid_targets(0));
    targets += alone.valid_targets(0);
    mean_sum += mean;
  }
  ListSource source(sequences);
  EXPECT_NEAR(one_step({}, &source).loss, nll_sum / static_cast<double>(targets), 1e-5);
  EXPECT_NEAR(one_step({"batch.loss=sequence_mean"}, &source).loss, mean_sum / 4.0, 1e-5);
}

TEST(Trainer, ABatchWithoutAnyTargetHasNoGradient) {
  std::vector<TokenSequence> sequences = some_sequences();
  for (TokenSequence& sequence : sequences) std::fill(sequence.labels.begin(), sequence.labels.end(), kIgnoredLabel);
  ListSource source(sequences);
  const OneStep step = one_step({}, &source);
  EXPECT_EQ(step.loss, 0.0);
  EXPECT_EQ(step.grad_norm, 0.0);
}

// The test data's ten AdamW steps of PyTorch and `transformers`, through the whole trainer.
class HfTraining : public testing::TestWithParam<const char*> {};

TEST_P(HfTraining, TenStepsAsInPyTorch) {
  const test::HfFixture fixture(GetParam());
  std::vector<TokenSequence> sequences;
  for (const std::vector<int32_t>& tokens : fixture.sequences) {
    sequences.push_back({static_cast<int64_t>(sequences.size()), tokens, {tokens.begin() + 1, tokens.end()}});
    sequences.back().labels.push_back(kIgnoredLabel);
  }
  ListSource source(sequences);
  ScratchDirectory scratch;
  RunConfig config = parse_run_config(
      "model: {path: " + fixture.directory.string() + "}\ndata: {synthetic: {length: 150}}\n", "fixture.yaml",
      {"train.output_dir=" + (scratch / "run").string(), "optimizer.schedule=constant",
       "batch.global_batch_size=" + std::to_string(sequences.size()), "batch.micro_batch_sequences=2"});
  config.optimizer.learning_rate = fixture.learning_rate;
  config.optimizer.beta1 = fixture.beta1;
  config.optimizer.beta2 = fixture.beta2;
  config.optimizer.eps = fixture.eps;
  config.optimizer.weight_decay = fixture.weight_decay;
  config.optimizer.max_grad_norm = fixture.clip;
  TinyTrainer trainer(config, {nullptr, &source, [] { return false; }});
  ASSERT_EQ(fixture.losses.size(), 10u);
  for (size_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(trainer->step());
    EXPECT_NEAR(trainer->last_step().loss, fixture.losses[i], 1e-4 * fixture.losses[i]) << "step " << i + 1;
    EXPECT_NEAR(trainer->last_step().grad_norm, fixture.grad_norms[i], 1e-4 * fixture.grad_norms[i])
        << "step " << i + 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, HfTraining, testing::Values("qwen2_tied", "llama_untied"));

TEST(Trainer, TwentyStepsOrTenAndTenGiveTheSameBytes) {
  // The curriculum changes the length on both sides of the break.
  const std::vector<std::string> common = {"data.synthetic.min_length=0", "data.synthetic.curriculum.start_length=12",
                                           "data.synthetic.curriculum.threshold=0.01",
                                           "data.synthetic.curriculum.min_observations=7"};
  ScratchDirectory scratch;
  const auto run = [&](const std::string& name, const std::string& steps) {
    std::vector<std::string> overrides = common;
    overrides.push_back("train.max_steps=" + steps);
    TinyTrainer trainer(tiny_run(scratch / name, overrides));
    return trainer->run();
  };
  run("whole", "20");
  run("halves", "10");
  const TrainSummary second = run("halves", "20");
  EXPECT_EQ(second.steps, 20);
  EXPECT_EQ(bytes_of_final_weights(scratch / "whole"), bytes_of_final_weights(scratch / "halves"));
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"})
    EXPECT_EQ(read_bytes(scratch / "whole" / "checkpoint-20" / file),
              read_bytes(scratch / "halves" / "checkpoint-20" / file))
        << file;

  const auto whole = metrics_of(scratch / "whole"), halves = metrics_of(scratch / "halves");
  std::vector<nlohmann::json> whole_steps, halves_steps;
  std::copy_if(whole.begin(), whole.end(), std::back_inserter(whole_steps), [](auto& o) { return o.contains("loss"); });
  std::copy_if(halves.begin(), halves.end(), std::back_inserter(halves_steps),
               [](auto& o) { return o.contains("loss"); });
  ASSERT_EQ(whole_steps.size(), 20u);
  ASSERT_EQ(halves_steps.size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(whole_steps[i]["step"], i + 1);
    for (const char* key : {"step", "loss", "grad_norm", "learning_rate", "longest_sequence"})
      EXPECT_EQ(whole_steps[i][key], halves_steps[i][key]) << key << " " << i;
  }
  EXPECT_EQ(whole_steps.front()["longest_sequence"], 12);
  EXPECT_EQ(whole_steps.back()["longest_sequence"], 48);
}

TEST(Trainer, StoppingInTheMiddleOfAStepSavesAndResumesExactly) {
  ScratchDirectory scratch;
  const std::vector<std::string> cosine = {"optimizer.schedule=cosine", "train.save_steps=0"};
  TinyTrainer(tiny_run(scratch / "whole", cosine))->run();
  for (const int stop_at : {0, 1, 13, 26}) {  // two micro-batches per step
    SCOPED_TRACE(stop_at);
    const fs::path run = scratch / ("stopped-" + std::to_string(stop_at));
    int asked = 0;
    {
      TinyTrainer trainer(tiny_run(run, cosine), {nullptr, nullptr, [&] { return asked++ >= stop_at + 4; }});
      const TrainSummary summary = trainer->run();
      EXPECT_TRUE(summary.interrupted);
      EXPECT_FALSE(fs::exists(run / "final"));
      EXPECT_EQ(find_damage(summary.checkpoint), std::nullopt);
    }
    TinyTrainer(tiny_run(run, cosine))->run();
    EXPECT_EQ(bytes_of_final_weights(run), bytes_of_final_weights(scratch / "whole"));
  }
}

// Asked to stop after so many questions, whatever the trainer is doing then: what is missing of a validation comes when
// the run goes on, what is there does not come again.
TEST(Trainer, EveryValidationIsRecordedOnceHoweverOftenTheRunIsStopped) {
  const auto validated = [](const fs::path& run) {
    std::vector<int64_t> steps;
    std::ifstream in(run / "metrics.jsonl");
    for (std::string line; std::getline(in, line);)
      if (const auto json = nlohmann::json::parse(line); json.contains("validation_loss"))
        steps.push_back(json["step"].get<int64_t>());
    return steps;
  };
  ScratchDirectory scratch;
  const std::vector<std::string> often = {"train.max_steps=4", "train.validation_steps=2", "train.save_steps=0"};
  for (int stop_at = 0; stop_at < 24; ++stop_at) {
    SCOPED_TRACE(stop_at);
    const fs::path run = scratch / std::to_string(stop_at);
    int asked = 0;
    TinyTrainer(tiny_run(run, often), {nullptr, nullptr, [&] { return asked++ >= stop_at; }})->run();
    TinyTrainer(tiny_run(run, often))->run();
    EXPECT_EQ(validated(run), (std::vector<int64_t>{0, 2, 4}));
  }
}

TEST(Trainer, ADamagedCheckpointCostsOnlyTheStepsSinceTheOneBefore) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "whole"))->run();
  TinyTrainer(tiny_run(scratch / "run", {"train.max_steps=10"}))->run();
  fs::resize_file(scratch / "run" / "checkpoint-10" / "model.safetensors", 50);
  testing::internal::CaptureStderr();
  {
    TinyTrainer trainer(tiny_run(scratch / "run"));
    EXPECT_EQ(trainer->state().step, 5);
    trainer->run();
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find("checkpoint-10, which is damaged"), std::string::npos);
  EXPECT_EQ(bytes_of_final_weights(scratch / "run"), bytes_of_final_weights(scratch / "whole"));
}

TEST(Trainer, AFinishedRunOnlyWritesItsModelAgain) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "run"))->run();
  const std::string before = bytes_of_final_weights(scratch / "run");
  fs::remove_all(scratch / "run" / "final");
  const TrainSummary summary = TinyTrainer(tiny_run(scratch / "run"))->run();
  EXPECT_EQ(summary.tokens, 0);
  EXPECT_EQ(bytes_of_final_weights(scratch / "run"), before);
}

TEST(Trainer, KeepsOnlyTheLastCheckpoints) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "run", {"train.save_steps=3", "train.save_total_limit=2"}))->run();
  EXPECT_EQ(checkpoint_steps(scratch / "run"), (std::vector<int64_t>{18, 20}));
}

// Attention, dense unless given, that writes a NaN in the forward calls it is told to.
class PoisonedAttention final : public ForwardingAttention {
 public:
  explicit PoisonedAttention(std::function<bool(int call)> poison, Attention* inner = nullptr)
      : ForwardingAttention(inner ? *inner : dense_), poison_(std::move(poison)) {}
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    if (layer == 0 && poison_(calls_++)) operands.out.f32()[0] = NAN;
  }

 private:
  DenseAttention dense_;
  std::function<bool(int)> poison_;
  int calls_ = 0;
};

TEST(Trainer, ANonFiniteGradientSkipsTheStepAndIsCounted) {
  ScratchDirectory scratch;
  // One micro-batch a step: the third forward is the third step.
  PoisonedAttention attention([](int call) { return call == 2; });
  TinyTrainer trainer(tiny_run(scratch / "run", {"batch.micro_batch_sequences=4"}),
                      {&attention, nullptr, [] { return false; }});
  trainer->step();
  trainer->step();
  const std::vector<float> before = weights_of(*trainer);
  trainer->step();
  EXPECT_TRUE(trainer->last_step().skipped);
  EXPECT_EQ(weights_of(*trainer), before);
  EXPECT_EQ(trainer->state().step, 3);
  EXPECT_EQ(trainer->state().updates, 2);
  EXPECT_EQ(trainer->state().skipped, 1);
  EXPECT_EQ(trainer->state().skipped_in_row, 1);
  EXPECT_EQ(trainer->state().position, 12u);
  trainer->step();
  EXPECT_FALSE(trainer->last_step().skipped);
  EXPECT_NE(weights_of(*trainer), before);
  EXPECT_EQ(trainer->state().skipped, 1);
  EXPECT_EQ(trainer->state().skipped_in_row, 0);
  const auto metrics = metrics_of(scratch / "run");
  EXPECT_TRUE(metrics[2]["grad_norm"].is_null());
  EXPECT_EQ(metrics[2]["skipped_steps"], 1);
  EXPECT_EQ(metrics[3]["skipped_steps"], 1);
}

// Ranks would go on with different ones, and a resumed run with others than this one.
TEST(Trainer, ASkippedStepTeachesSelectionNothing) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(
      scratch / "run", {"batch.micro_batch_sequences=4", "attention.pattern=mass", "attention.score=moments",
                        "attention.block=64", "attention.budget=256", "attention.local_blocks=1",
                        "data.synthetic={task: chunk_recall, vocab_size: 16, length: 600, min_length: 300, chunk: 4}"});
  SparseAttention sparse({config.attention.selection, 2});
  PoisonedAttention attention([](int call) { return call == 2; }, &sparse);
  TinyTrainer trainer(config, {&attention, nullptr, [] { return false; }, &sparse});
  trainer->step();
  trainer->step();
  const LearnedSelection before = trainer->state().selection;
  EXPECT_FALSE(before.thresholds.empty());
  trainer->step();
  EXPECT_TRUE(trainer->last_step().skipped);
  EXPECT_EQ(trainer->state().selection, before);
  trainer->step();
  EXPECT_NE(trainer->state().selection, before);
  // Of the fourth step alone: what the third one saw is not in it.
  for (const auto& [key, threshold] : trainer->state().selection.thresholds)
    EXPECT_TRUE(!before.thresholds.contains(key) || threshold != before.thresholds.at(key)) << key.layer;
}

// The planes of the first step come of sequences after its batch: nothing in the batch has a say in them.
TEST(Trainer, AFirstLookIsAtSequencesAfterTheFirstBatch) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(
      scratch / "run", {"batch.micro_batch_sequences=4", "attention.pattern=topk", "attention.score_channels=8",
                        "attention.block=64", "attention.budget=256", "attention.local_blocks=1",
                        "data.synthetic={task: chunk_recall, vocab_size: 16, length: 600, min_length: 300, chunk: 4}"});
  const auto planes = [&](int changed) {
    std::vector<TokenSequence> sequences;
    for (int i = 0; i < 200; ++i) {
      TokenSequence& sequence = sequences.emplace_back();
      for (int t = 0; t < 300 + i; ++t) sequence.tokens.push_back((t * (i + 3) + t / 7 + (i == changed ? 5 : 0)) % 16);
      sequence.labels.assign(sequence.tokens.begin() + 1, sequence.tokens.end());
      sequence.labels.push_back(kIgnoredLabel);
    }
    ListSource source(sequences);
    SparseAttention sparse({config.attention.selection, 2});
    TinyTrainer trainer(config, {&sparse, &source, [] { return false; }, &sparse});
    return trainer->state().selection.planes;
  };
  const std::vector<PlaneSums> learned = planes(-1);
  ASSERT_EQ(learned.size(), 2u);
  // Sequences of 304, 305, … tokens, every sixteenth token, until they are 32,768 or more.
  int64_t tokens = 0, sampled = 0;
  for (int64_t i = 4; tokens < 32768; tokens += 300 + i++) sampled += (300 + i + 15) / 16;
  EXPECT_EQ(learned[0].tokens, static_cast<double>(sampled));
  for (const int changed : {0, 3}) EXPECT_EQ(planes(changed), learned) << changed;
  for (const int changed : {4, 20}) EXPECT_NE(planes(changed), learned) << changed;
}

TEST(Trainer, TenNonFiniteGradientsInARowStopTheRun) {
  ScratchDirectory scratch;
  std::vector<TokenSequence> sequences = some_sequences();
  ListSource source(sequences);
  PoisonedAttention attention([](int call) { return call >= 6 && call != 10; });
  TinyTrainer trainer(tiny_run(scratch / "run", {"batch.micro_batch_sequences=4", "train.max_steps=50"}),
                      {&attention, &source, [] { return false; }});
  int64_t steps = 0;
  const std::string message = user_error_of([&] {
    for (; steps < 50; ++steps) trainer->step();
  });
  // Steps 7 to 10 fail, 11 heals, 12 to 21 are ten in a row.
  EXPECT_EQ(steps, 20);
  EXPECT_NE(message.find("1000, 1001, 1002, 1003"), std::string::npos) << message;
  EXPECT_NE(message.find("10 steps in a row"), std::string::npos) << message;
  EXPECT_EQ(trainer->state().skipped, 14);
}

TEST(Trainer, AStreakKeepsTheCheckpointBeforeItAndAResumedRunTriesAgain) {
  ScratchDirectory scratch;
  const RunConfig config =
      tiny_run(scratch / "run", {"batch.micro_batch_sequences=4", "train.max_steps=30", "train.save_steps=1",
                                 "train.save_total_limit=2", "train.validation_sequences=0"});
  {
    PoisonedAttention attention([](int call) { return call >= 3; });
    TinyTrainer trainer(config, {&attention, nullptr, [] { return false; }});
    const std::string message = user_error_of([&] { trainer->run(); });
    EXPECT_NE(message.find("from before that is " + (scratch / "run/checkpoint-3").string()), std::string::npos)
        << message;
  }
  EXPECT_EQ(checkpoint_steps(scratch / "run"), (std::vector<int64_t>{3, 11, 12}));
  {
    // Four more that are not finite: not ten in this process. Then it heals.
    PoisonedAttention attention([](int call) { return call < 4; });
    TinyTrainer trainer(config, {&attention, nullptr, [] { return false; }});
    for (int step = 0; step < 4; ++step) EXPECT_TRUE(trainer->step());
    EXPECT_EQ(trainer->state().skipped_in_row, 13);  // 4 to 16, over both processes
    EXPECT_EQ(trainer->run().steps, 30);
    EXPECT_EQ(trainer->state().skipped_in_row, 0);
  }
  EXPECT_EQ(checkpoint_steps(scratch / "run"), (std::vector<int64_t>{29, 30}));
}

TEST(Trainer, ClippingLimitsTheUpdateButNotTheReportedNorm) {
  const OneStep clipped = one_step({"optimizer.max_grad_norm=0.001"}), free = one_step({"optimizer.max_grad_norm=0"});
  EXPECT_EQ(clipped.grad_norm, free.grad_norm);
  EXPECT_NEAR(norm(free.gradients), free.grad_norm, 1e-5 * free.grad_norm);
}

TEST(Trainer, ValidationMeasuresAndChangesNothing) {
  ScratchDirectory scratch;
  const TrainSummary with = TinyTrainer(tiny_run(scratch / "with", {"train.validation_steps=5"}))->run();
  TinyTrainer(tiny_run(scratch / "without", {"train.validation_sequences=1", "train.validation_steps=0"}))->run();
  EXPECT_EQ(bytes_of_final_weights(scratch / "with"), bytes_of_final_weights(scratch / "without"));
  ASSERT_TRUE(with.first_validation && with.last_validation);
  EXPECT_EQ(with.first_validation->step, 0);
  EXPECT_EQ(with.last_validation->step, 20);
  EXPECT_LT(with.last_validation->loss, with.first_validation->loss);

  std::vector<int64_t> steps;
  for (const auto& object : metrics_of(scratch / "with")) {
    if (!object.contains("validation_loss")) continue;
    steps.push_back(object["step"]);
    EXPECT_NEAR(object["validation_loss"].get<double>(), std::log(16.0), 1.0);
    EXPECT_TRUE(object["validation_recall"].is_number());
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{0, 5, 10, 15, 20}));
}

constexpr std::chrono::milliseconds kPause(40);

class SlowSource final : public SequenceSource {
 public:
  explicit SlowSource(const SequenceSource& inner) : inner_(inner) {}
  int64_t length(uint64_t position) const override { return inner_.length(position); }
  int64_t valid_targets(uint64_t position) const override { return inner_.valid_targets(position); }
  TokenSequence read(uint64_t position) const override {
    std::this_thread::sleep_for(kPause);
    return inner_.read(position);
  }
  int64_t max_length() const override { return inner_.max_length(); }

 private:
  const SequenceSource& inner_;
};

// Slow where a checkpoint asks for its state.
class SlowlySavedPlanner final : public StepPlanner {
 public:
  explicit SlowlySavedPlanner(const PackingLimits& limits) : inner_(1, 2, limits) {}
  void announce(int64_t step, std::vector<Sequence> sequences) override { inner_.announce(step, std::move(sequences)); }
  Plan next() override { return inner_.next(); }
  std::string state() const override {
    std::this_thread::sleep_for(kPause);
    return {};
  }

 private:
  InOrderPlanner inner_;
};

// After the last step a validation and a checkpoint are left, and nothing else.
TEST(Trainer, TheTimeLeftHasValidationsAndCheckpoints) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "run", {"train.max_steps=4", "train.validation_steps=2",
                                                      "train.save_steps=3", "train.validation_sequences=1"});
  const auto inner = make_synthetic_source(*config.data.synthetic, 7);
  const SlowSource validation(*inner);
  SlowlySavedPlanner planner(packing_limits(config.batch, inner->max_length(), 1));
  TinyTrainer::Replace replace;
  replace.validation = &validation;
  replace.planner = &planner;
  TinyTrainer trainer(config, replace);
  trainer->run();
  // The validation reads its sequence twice, the second time for the recall.
  EXPECT_GE(trainer->last_step().seconds_left, std::chrono::duration<double>(3 * kPause).count());
}

TEST(Trainer, MetricsHaveTheDocumentedKeysEveryStep) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "run", {"train.max_steps=3", "train.tensorboard=true", "train.trace=true"}))->run();
  int64_t step = 0, total = 0;
  for (const auto& object : metrics_of(scratch / "run")) {
    if (object.contains("validation_loss")) continue;
    EXPECT_EQ(object["step"], ++step);
    for (const char* key : {"loss", "grad_norm", "learning_rate", "tokens_per_second", "step_ms", "accuracy"})
      EXPECT_TRUE(object[key].is_number_float()) << key;
    EXPECT_TRUE(object["tokens"].is_number_integer());
    total += object["tokens"].get<int64_t>();
    EXPECT_EQ(object["total_tokens"], total);
    EXPECT_GE(object["tokens"], 4 * 17);
    EXPECT_LE(object["tokens"], 4 * 48);
  }
  EXPECT_EQ(step, 3);
  EXPECT_FALSE(fs::is_empty(scratch / "run" / "tensorboard"));
  std::map<std::string, int> spans;
  for (const auto& event : nlohmann::json::parse(read_bytes(scratch / "run" / "trace.json")))
    ++spans[event["name"].get<std::string>()];
  EXPECT_EQ(spans["step"], 3);
  EXPECT_EQ(spans["forward"], 6);
  EXPECT_EQ(spans["backward"], 6);
  EXPECT_EQ(spans["update"], 3);
  EXPECT_EQ(spans["save"], 1);
  EXPECT_EQ(spans["validation"], 2);
}

TEST(Trainer, AResumedRunKeepsTheTraceOfTheOneBefore) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "run", {"train.trace=true", "train.max_steps=2"}))->run();
  const std::string first = read_bytes(scratch / "run" / "trace.json");
  TinyTrainer(tiny_run(scratch / "run", {"train.trace=true", "train.max_steps=5"}))->run();
  EXPECT_EQ(read_bytes(scratch / "run" / "trace.json"), first);
  int steps = 0;
  for (const auto& event : nlohmann::json::parse(read_bytes(scratch / "run" / "trace-2.json")))
    steps += event["name"] == "step";
  EXPECT_EQ(steps, 3);
}

std::vector<float> logits_of(const fs::path& directory, const MicroBatch& batch) {
  const ModelConfig model = read_model_config(directory / "config.json");
  DenseAttention attention;
  StageOptions options;
  options.last_layer = model.layers;
  options.max_micro_batch_tokens = options.max_sequence_length = batch.size();
  options.training = false;
  Stage stage(model, options, attention, 1);
  read_hf_weights(directory, stage.parameters());
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  stage.evaluate(exec, batch, 0, {});
  std::vector<float> logits(static_cast<size_t>(batch.size() * model.vocab_size));
  stage.logits(exec, 0, 0, batch.size(), {logits.data(), {batch.size(), model.vocab_size}});
  return logits;
}

TEST(Trainer, TheOutputReadBackGivesTheSameLogits) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "run", {"train.threads=1"});
  TinyTrainer trainer(config);
  trainer->run();
  const std::vector<TokenSequence> sequences = some_sequences();
  const std::vector<int> chosen = {3};
  const std::vector<float> weights(4, 1.0f);
  const MicroBatch batch = make_micro_batch(sequences, chosen, weights, 16);
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  trainer->stage().evaluate(exec, batch, 0, {});
  std::vector<float> trained(static_cast<size_t>(batch.size() * 16));
  trainer->stage().logits(exec, 0, 0, batch.size(), {trained.data(), {batch.size(), 16}});
  EXPECT_EQ(logits_of(scratch / "run" / "final", batch), trained);
  EXPECT_EQ(logits_of(scratch / "run" / "checkpoint-20", batch), trained);
}

TEST(Trainer, BfloatOutputIsTheRoundedModel) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "run", {"model.save_dtype=bfloat16", "train.max_steps=2"}))->run();
  EXPECT_LT(fs::file_size(scratch / "run" / "final" / "model.safetensors"),
            fs::file_size(scratch / "run" / "checkpoint-2" / "model.safetensors"));
}

}  // namespace
}  // namespace sb
