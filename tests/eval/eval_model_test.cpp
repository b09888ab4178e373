#include "eval/eval_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <numeric>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "model/hf_checkpoint.h"
#include "tests/eval/small_model.h"
#include "tests/run/scratch_directory.h"

namespace sb {
namespace {

constexpr int64_t kCapacity = 800;

SelectionConfig selection(SelectionPattern pattern) {
  SelectionConfig config;
  config.pattern = pattern;
  config.budget = 384;
  config.coverage = 0.5;
  return config;
}

// The same weights on a stage of the CPU, without caches.
struct Reference {
  ThreadPool pool{2};
  Exec exec = {.pool = &pool};
  std::unique_ptr<Attention> attention;
  std::unique_ptr<Stage> stage;

  explicit Reference(const std::optional<SelectionConfig>& pattern) {
    if (pattern)
      attention = std::make_unique<SparseAttention>(SparseAttention::Options{*pattern, 2});
    else
      attention = std::make_unique<DenseAttention>();
    StageOptions options;
    options.last_layer = 2;
    options.max_micro_batch_tokens = options.max_sequence_length = kCapacity;
    options.training = false;
    stage = std::make_unique<Stage>(small_model(64), options, *attention, 2);
    stage->initialize(5);
  }

  void run(const std::vector<int32_t>& tokens, const std::vector<int32_t>& labels) {
    MicroBatch batch;
    batch.tokens = tokens;
    batch.labels = labels;
    batch.positions.resize(tokens.size());
    std::iota(batch.positions.begin(), batch.positions.end(), 0);
    batch.weights.assign(tokens.size(), 1.0f);
    batch.cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
    batch.sequence_ids = {0};
    stage->forward(exec, batch, 0, {});
  }
};

struct Where {
  const char* name;
  DeviceKind device;
  DType dtype;
};

class EvalModelTest : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (on_cuda() && !cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    write_hf_model(directory_.path(), small_model(64), Reference({}).stage->parameters(), {});
  }
  bool on_cuda() const { return GetParam().device == DeviceKind::cuda; }
  // `fp32` on the CPU and on CUDA alike, what rounding the weights and every activation leaves otherwise.
  double tolerance(double fp32, double bf16) const { return GetParam().dtype == DType::f32 ? fp32 : bf16; }

  EvalModel open(const std::optional<SelectionConfig>& pattern, int batch = 1,
                 const LearnedSelection& learned = {}) const {
    EvalModelOptions options;
    options.model = directory_.path();
    options.attention = pattern;
    options.learned = learned;
    options.max_tokens = kCapacity;
    options.batch = batch;
    options.threads = 2;
    options.device = GetParam().device;
    options.dtype = GetParam().dtype;
    return EvalModel(options);
  }

  ScratchDirectory directory_;
};

std::vector<Where> everywhere() {
  std::vector<Where> places = {{"cpu", DeviceKind::cpu, DType::f32}};
#ifdef SB_TEST_CUDA
  places.push_back({"cuda_f32", DeviceKind::cuda, DType::f32});
  places.push_back({"cuda_bf16", DeviceKind::cuda, DType::bf16});
#endif
  return places;
}
INSTANTIATE_TEST_SUITE_P(Devices, EvalModelTest, testing::ValuesIn(everywhere()),
                         [](const auto& place) { return std::string(place.param.name); });

std::vector<std::optional<SelectionConfig>> patterns() {
  return {std::nullopt, selection(SelectionPattern::topk), selection(SelectionPattern::topp),
          selection(SelectionPattern::window)};
}

TEST_P(EvalModelTest, AnswersEndAtTheTokensOfTheGenerationConfigToo) {
  ModelConfig config = small_model(64);
  config.eos_token_ids = {7};
  write_hf_model(directory_.path(), config, Reference({}).stage->parameters(), {});
  const auto stops = [&](const char* text) {
    std::ofstream(directory_ / "generation_config.json") << text;
    return open({}).stop_tokens();
  };
  EXPECT_EQ(open({}).stop_tokens(), (std::vector<int32_t>{7}));
  EXPECT_EQ(stops(R"({"eos_token_id": [9, 7, 3]})"), (std::vector<int32_t>{7, 9, 3}));
  EXPECT_EQ(stops(R"({"eos_token_id": 9})"), (std::vector<int32_t>{7, 9}));
  EXPECT_EQ(stops(R"({"eos_token_id": null})"), (std::vector<int32_t>{7}));
  testing::internal::CaptureStderr();
  EXPECT_EQ(stops(R"({"eos_token_id": [61, "end"]})"), (std::vector<int32_t>{7})) << "61 tokens: 0 to 60";
  EXPECT_NE(testing::internal::GetCapturedStderr().find("61 is not a token of the model"), std::string::npos);
  EXPECT_EQ(stops("not JSON"), (std::vector<int32_t>{7}));
}

// Puts a tokenizer with a token a character beside the model, `more` after them. Empty where this build has one.
std::string why_no_tokenizer(const std::filesystem::path& directory, const std::string& characters,
                             const std::string& more = "", const std::string& added = "") {
  std::string vocabulary;
  for (size_t i = 0; i < characters.size(); ++i)
    vocabulary += fmt::format("{}\"{}\": {}", i == 0 ? "" : ", ", characters[i], i);
  std::ofstream(directory / "tokenizer.json")
      << "{\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {" << vocabulary << more
      << "}}, \"added_tokens\": [" << added
      << "], \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}}";
  try {
    Tokenizer::load((directory / "tokenizer.json").string());
    return "";
  } catch (const UserError& error) {
    if (std::string(error.what()).find("this build has no tokenizer") == std::string::npos) throw;
    return error.what();
  }
}

TEST_P(EvalModelTest, ChatsAreAskedAsTheyWereTrained) {
  const std::string missing = why_no_tokenizer(
      directory_.path(), "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345", ", \"\\u010a\": 58",
      R"({"id": 59, "content": "<|im_start|>", "special": true}, {"id": 60, "content": "<|im_end|>", "special": true})");
  if (!missing.empty()) GTEST_SKIP() << missing;
  EvalModel model = open({});
  GenerationOptions options;
  options.max_new_tokens = 12;
  const std::vector<int32_t> question =
      model.tokenizer().encode("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(question.front(), 59);
  GenerationOptions until_the_end = options;
  until_the_end.stop_tokens = {60};
  const std::string expected = model.tokenizer().decode(model.generate({question}, until_the_end)[0], true);
  EXPECT_EQ(model.answer({"why"}, options, {}, {.chat = true})[0], expected);
  EXPECT_NE(model.answer({"why"}, options)[0], expected);
}

// The vocabulary of a checkpoint is padded: its tokenizer does not know all ids that the model may choose.
TEST_P(EvalModelTest, AnswersAreReadWithoutTheIdsThatTheTokenizerLacks) {
  const std::string characters = "abcdefghijklmnopqrstuvwxyzABCDE";  // 31 of the model's 61 ids
  const std::string missing = why_no_tokenizer(directory_.path(), characters);
  if (!missing.empty()) GTEST_SKIP() << missing;
  EvalModel model = open({});
  GenerationOptions options;
  options.max_new_tokens = 64;
  options.sampling.temperature = 5;
  std::string expected;
  int left_out = 0;
  const std::vector<int32_t> generated = model.generate({{0, 1}}, options)[0];
  for (const int32_t id : generated) {
    if (id < 31)
      expected += characters[static_cast<size_t>(id)];
    else
      ++left_out;
  }
  ASSERT_GT(left_out, 0);
  ASSERT_FALSE(expected.empty());
  testing::internal::CaptureStderr();
  EXPECT_EQ(model.answer({"ab"}, options)[0], expected);
  EXPECT_NE(testing::internal::GetCapturedStderr().find(fmt::format("{} tokens of the answers are not in", left_out)),
            std::string::npos);
}

TEST_P(EvalModelTest, PromptsThatAreTooLongLoseTheirMiddleOnRequest) {
  const std::string characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678";  // 61
  const std::string missing = why_no_tokenizer(directory_.path(), characters);
  if (!missing.empty()) GTEST_SKIP() << missing;
  EvalModel model = open({});
  GenerationOptions options;
  options.max_new_tokens = 5;
  const int64_t room = kCapacity - 5;
  const std::vector<int32_t> ids = random_tokens(room + 31, 3);
  std::string text;
  for (const int32_t id : ids) text += characters[static_cast<size_t>(id)];
  EXPECT_THROW(model.answer({text}, options), UserError);
  std::vector<int32_t> halves(ids.begin(), ids.begin() + 398);  // of 795
  halves.insert(halves.end(), ids.end() - 397, ids.end());
  const std::string expected = model.tokenizer().decode(model.generate({halves}, options)[0]);
  testing::internal::CaptureStderr();
  EXPECT_EQ(model.answer({text, "ab"}, options, {}, {.cut_middle = true})[0], expected);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("1 of 2 prompts have more than 795 tokens"), std::string::npos);
}

TEST_P(EvalModelTest, SaysOnceThatSequencesAreLongerThanTheModelReaches) {
  ModelConfig short_model = small_model(64);
  short_model.max_position_embeddings = 100;
  write_hf_model(directory_.path(), short_model, Reference({}).stage->parameters(), {});
  const auto warnings = [](const auto& use) {
    testing::internal::CaptureStderr();
    use();
    const std::string log = testing::internal::GetCapturedStderr();
    int count = 0;
    for (size_t at = log.find("the model supports 100"); at != std::string::npos;
         at = log.find("the model supports 100", at + 1))
      ++count;
    return count;
  };
  EvalModel scored = open({}), continued = open({});
  const auto score = [&](int64_t length) { scored.score(random_tokens(length, 3), random_tokens(length, 4)); };
  EXPECT_EQ(warnings([&] { score(100); }), 0);
  EXPECT_EQ(warnings([&] { score(101), score(102); }), 1);
  GenerationOptions four;
  four.max_new_tokens = 4;
  EXPECT_EQ(warnings([&] { continued.generate({random_tokens(96, 5)}, four); }), 0);
  EXPECT_EQ(warnings([&] { continued.generate({random_tokens(97, 5)}, four); }), 1);
}

TEST_P(EvalModelTest, LossesAreThoseOfTheCpu) {
  for (const auto& pattern : patterns()) {
    SCOPED_TRACE(pattern ? static_cast<int>(pattern->pattern) : -1);
    Reference reference(pattern);
    EvalModel model = open(pattern);
    for (const int64_t length : {1, 130, 700}) {
      const std::vector<int32_t> tokens = random_tokens(length, 3);
      std::vector<int32_t> labels = random_tokens(length, 4);
      if (length > 1) labels[1] = kIgnoredLabel;
      reference.run(tokens, labels);
      const LossSums& expected = reference.stage->loss(0);
      const EvalModel::Score got = model.score(tokens, labels);
      EXPECT_EQ(got.sums.targets, expected.targets);
      EXPECT_NEAR(got.sums.nll / expected.nll, 1.0, tolerance(1e-5, 1e-2)) << length;
      ASSERT_EQ(std::ssize(got.token_loss), length);
      const float* losses = reference.stage->token_loss(0).f32();
      double largest = 0;
      for (size_t i = 0; i < got.token_loss.size(); ++i)
        largest = std::max<double>(largest, std::abs(got.token_loss[i] - losses[i]));
      const double mean = expected.nll / static_cast<double>(expected.targets);
      EXPECT_LT(largest, tolerance(1e-3, 0.1) * mean) << length;
    }
  }
}

// Every new token is the likeliest one when the whole sequence runs at once on the CPU; with rounding, as likely as the
// likeliest but for that.
// 700 tokens are five key blocks of 128 and 60 tokens more. With the smallest budget a query reads its own block and
// the one before it, in each of the two kv heads and layers.
TEST_P(EvalModelTest, ScoresCountThePairsAndTheMassThatWereRead) {
  SelectionConfig window = selection(SelectionPattern::window);
  window.dense_below = 0;
  window.budget = 1;
  window.local_blocks = 0;
  window.sink_blocks = 0;
  const std::vector<int32_t> tokens = random_tokens(700, 3);
  EvalModelOptions options;
  options.model = directory_.path();
  options.attention = window;
  options.max_tokens = kCapacity;
  options.threads = 2;
  options.coverage_rows = 4;
  options.device = GetParam().device;
  options.dtype = GetParam().dtype;
  EvalModel model(options);
  GenerationOptions one;
  one.max_new_tokens = 1;
  model.generate({tokens}, one);  // counts nothing into the score
  const LayerAttention sparse = model.score(tokens, tokens).attention;
  EXPECT_EQ(sparse.pairs, 4 * (5 * 128 * 129 / 2 + 60 * 61 / 2 + 4 * 128 * 128 + 60 * 128));
  EXPECT_EQ(sparse.causal_pairs, 4 * 700 * 701 / 2);
  EXPECT_EQ(sparse.covered_tokens, 2 * 700);
  EXPECT_GT(sparse.mean_coverage(), 0.1);
  EXPECT_LT(sparse.mean_coverage(), 0.999);
  EXPECT_EQ(sparse.pairs, model.score(tokens, tokens).attention.pairs);
  EXPECT_EQ(open({}).score(tokens, tokens).attention.density(), 1.0);
}

TEST_P(EvalModelTest, ContinuesPromptsAsTheCpuWould) {
  for (const auto& pattern : patterns()) {
    SCOPED_TRACE(pattern ? static_cast<int>(pattern->pattern) : -1);
    Reference reference(pattern);
    EvalModel model = open(pattern, 2);
    const std::vector<std::vector<int32_t>> prompts = {random_tokens(600, 7), random_tokens(1, 8),
                                                       random_tokens(250, 9)};
    GenerationOptions options;
    options.max_new_tokens = 24;  // crosses a tile and a block
    const auto answers = model.generate(prompts, options);
    for (size_t i = 0; i < prompts.size(); ++i) {
      ASSERT_EQ(answers[i].size(), 24u);
      for (size_t n = 0; n < answers[i].size(); ++n) {
        std::vector<int32_t> tokens = prompts[i];
        tokens.insert(tokens.end(), answers[i].begin(), answers[i].begin() + static_cast<ptrdiff_t>(n));
        reference.run(tokens, std::vector<int32_t>(tokens.size(), kIgnoredLabel));
        std::vector<float> logits(61);
        const int64_t last = std::ssize(tokens) - 1;
        reference.stage->logits(reference.exec, 0, last, last + 1, {logits.data(), {1, 61}});
        const auto [least, most] = std::minmax_element(logits.begin(), logits.end());
        const float chosen = logits[static_cast<size_t>(answers[i][n])];
        ASSERT_LE(*most - chosen, tolerance(1e-4, 0.05) * (*most - *least)) << "prompt " << i << ", token " << n;
      }
    }
  }
}

// A model that brings no statistics of planes gets them from the first tokens that it is asked about.
TEST_P(EvalModelTest, PlanesComeFromAFirstForward) {
  SelectionConfig by_planes = selection(SelectionPattern::topk);
  by_planes.score = BlockScore::planes;
  by_planes.score_channels = 4;
  const std::vector<int32_t> first = random_tokens(700, 3), second = random_tokens(600, 4);
  EvalModel model = open(by_planes);
  const std::vector<float> loss = model.score(first, first).token_loss;
  model.score(second, second);
  EXPECT_EQ(model.score(first, first).token_loss, loss);  // taken once
  const std::vector<float> dense = open({}).score(first, first).token_loss;
  EXPECT_NE(loss, dense);
  GenerationOptions options;
  options.max_new_tokens = 4;
  EXPECT_EQ(open(by_planes).generate({first}, options).front().size(), 4u);
}

// Training learns from what it sees; asking must not.
TEST_P(EvalModelTest, WhatWasAskedBeforeChangesNothing) {
  LearnedSelection learned;
  learned.thresholds = {{{0, 10, 3}, {-0.8f}}, {{1, 10, 3}, {1.6f}}};
  const std::vector<int32_t> first = random_tokens(700, 3), second = random_tokens(600, 4);
  EvalModel model = open(selection(SelectionPattern::mass), 1, learned);
  const std::vector<float> alone = model.score(first, first).token_loss;
  model.score(second, second);
  EXPECT_EQ(model.score(first, first).token_loss, alone);
  GenerationOptions options;
  options.max_new_tokens = 6;
  const auto answer = model.generate({first}, options);
  model.score(second, second);
  EXPECT_EQ(model.generate({second, first}, options)[1], answer[0]);
  // They are used: another model that learned something else sees other keys.
  EvalModel cold = open(selection(SelectionPattern::mass));
  EXPECT_NE(cold.score(first, first).token_loss, alone);
}

TEST_P(EvalModelTest, ScoresBetweenAnswersChangeNeither) {
  EvalModel model = open(selection(SelectionPattern::topk));
  GenerationOptions options;
  options.max_new_tokens = 6;
  const std::vector<int32_t> prompt = random_tokens(500, 2);
  const auto first = model.generate({prompt}, options);
  const EvalModel::Score score = model.score(prompt, prompt);
  EXPECT_EQ(model.generate({prompt}, options), first);
  EXPECT_EQ(model.score(prompt, prompt).token_loss, score.token_loss);
}

// The letters of four choices are scored after one forward; alone each costs one.
TEST_P(EvalModelTest, WhatComesNextIsAsLikelyAsItsScore) {
  const std::string characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678";  // 61
  const std::string missing = why_no_tokenizer(directory_.path(), characters);
  if (!missing.empty()) GTEST_SKIP() << missing;
  EvalModel model = open({});
  const std::vector<double> likelihoods = model.next("hello", "is", {"A", "B"});
  ASSERT_EQ(likelihoods.size(), 2u);
  std::vector<int32_t> tokens = model.tokenizer().encode("hellois"), labels(tokens.size(), kIgnoredLabel);
  for (size_t i = 0; i < 2; ++i) {
    labels.back() = model.tokenizer().encode(i == 0 ? "A" : "B").front();
    EXPECT_NEAR(likelihoods[i], -model.score(tokens, labels).sums.nll, tolerance(1e-4, 0.05));
  }
  EXPECT_NE(likelihoods[0], likelihoods[1]);
  EXPECT_THROW(model.next(std::string(kCapacity, 'a'), "is", {"A"}), UserError);
  EXPECT_EQ(model.next(std::string(kCapacity, 'a'), "is", {"A"}, {.cut_middle = true}).size(), 1u);
}

}  // namespace
}  // namespace sb
