#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "device/memory.h"
#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

struct Problem {
  int64_t tokens, width, vocabulary;
  std::vector<float> hidden, weight, weights;
  std::vector<int32_t> labels;
};

struct Expected {
  LossSums sums;
  std::vector<double> token_loss;
};

// Straight from the definition, in fp64.
Expected reference(const Problem& p, const std::vector<double>& hidden, const std::vector<double>& weight) {
  Expected result;
  for (int64_t t = 0; t < p.tokens; ++t) {
    if (p.labels[t] == kIgnoredLabel) {
      result.token_loss.push_back(0);
      continue;
    }
    std::vector<double> logits(static_cast<size_t>(p.vocabulary));
    double largest = -INFINITY;
    for (int64_t v = 0; v < p.vocabulary; ++v) {
      for (int64_t i = 0; i < p.width; ++i) logits[v] += hidden[t * p.width + i] * weight[v * p.width + i];
      largest = std::max(largest, logits[v]);
    }
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - largest);
    const double loss = largest + std::log(sum) - logits[p.labels[t]];
    result.token_loss.push_back(loss);
    result.sums.nll += loss;
    result.sums.weighted += p.weights[t] * loss;
    result.sums.targets += 1;
    result.sums.correct += logits[p.labels[t]] == largest ? 1 : 0;
  }
  return result;
}
Expected reference(const Problem& p) {
  return reference(p, doubles(p.hidden), doubles(p.weight));
}

class CrossEntropyTest : public OpsTest {
 protected:
  Problem make_problem(int64_t tokens, int64_t width, int64_t vocabulary, double scale = 1.0) const {
    Problem p{.tokens = tokens,
              .width = width,
              .vocabulary = vocabulary,
              .hidden = {},
              .weight = {},
              .weights = {},
              .labels = {}};
    p.hidden = random_operand(tokens * width, 1, scale);
    p.weight = random_operand(vocabulary * width, 2);
    Random random(3);
    for (int64_t t = 0; t < tokens; ++t) {
      p.labels.push_back(t % 4 == 2 ? kIgnoredLabel : static_cast<int32_t>(random.below(vocabulary)));
      p.weights.push_back(static_cast<float>(0.1 + random.uniform()));
    }
    return p;
  }
  struct Run {
    LossSums sums;
    std::vector<float> token_loss, dhidden, dweight;
  };
  Run forward(const Problem& p, int64_t chunk) {
    const TensorView token_loss = filled_f32({p.tokens}, NAN);
    const HostMemory memory(sizeof(LossSums), exec().device);
    auto* sums = static_cast<LossSums*>(memory.data());
    loss_forward(exec(), tensor(p.hidden, {p.tokens, p.width}), tensor(p.weight, {p.vocabulary, p.width}),
                 tensor(p.labels, {p.tokens}), floats(p.weights, {p.tokens}), chunk, token_loss, sums, p.labels);
    std::vector<float> losses = host(token_loss);  // waits
    return {*sums, losses, {}, {}};
  }
  Run backward(const Problem& p, int64_t chunk, float dweight_before = 0, bool accumulate = true) {
    const TensorView token_loss = filled_f32({p.tokens}, NAN), dhidden = filled({p.tokens, p.width}, NAN),
                     dweight = filled_f32({p.vocabulary, p.width}, dweight_before);
    const HostMemory memory(sizeof(LossSums), exec().device);
    auto* sums = static_cast<LossSums*>(memory.data());
    loss_forward_backward(exec(), tensor(p.hidden, {p.tokens, p.width}), tensor(p.weight, {p.vocabulary, p.width}),
                          tensor(p.labels, {p.tokens}), floats(p.weights, {p.tokens}), chunk, token_loss, dhidden,
                          dweight, sums, p.labels, accumulate);
    std::vector<float> gradient = host(dweight);
    return {*sums, host(token_loss), host(dhidden), gradient};
  }
  // In bf16 the logits are rounded: losses and gradients differ by a few units in the last place of a logit, and a
  // close race for the largest may end differently.
  double loss_tolerance() const { return tolerance(1e-5, 8); }
  void expect_sums(const LossSums& actual, const LossSums& expected, double allowed) const {
    EXPECT_NEAR(actual.nll, expected.nll, allowed * (1 + std::abs(expected.nll)));
    EXPECT_NEAR(actual.weighted, expected.weighted, allowed * (1 + std::abs(expected.weighted)));
    EXPECT_EQ(actual.targets, expected.targets);
    const double races = dtype() == DType::bf16 ? 1 + 0.05 * static_cast<double>(expected.targets) : 0;
    EXPECT_NEAR(static_cast<double>(actual.correct), static_cast<double>(expected.correct), races);
  }
};
SB_INSTANTIATE_ON_ALL_DEVICES(CrossEntropyTest);

TEST_P(CrossEntropyTest, MatchesReferenceForAnyChunk) {
  for (const auto& [tokens, width, vocabulary] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {3, 5, 2}, {17, 8, 16}, {67, 13, 97}, {130, 32, 1009}}) {
    const Problem p = make_problem(tokens, width, vocabulary);
    const Expected expected = reference(p);
    for (const int64_t chunk : {int64_t{1}, int64_t{3}, int64_t{64}, tokens + 5}) {
      SCOPED_TRACE(::testing::Message() << tokens << "x" << width << "x" << vocabulary << " by " << chunk);
      const Run a = forward(p, chunk), b = backward(p, chunk);
      expect_sums(a.sums, expected.sums, loss_tolerance());
      expect_sums(b.sums, expected.sums, loss_tolerance());
      expect_close(a.token_loss, expected.token_loss, loss_tolerance(), "token loss");
      EXPECT_EQ(a.token_loss, b.token_loss);
    }
  }
}

TEST_P(CrossEntropyTest, WritesTheWeightGradientWithTheBitsOfAddingToZeros) {
  Problem p = make_problem(67, 13, 97);
  for (const int64_t chunk : {8, 100}) EXPECT_EQ(backward(p, chunk, NAN, false).dweight, backward(p, chunk).dweight);
  std::fill(p.labels.begin(), p.labels.end(), kIgnoredLabel);
  EXPECT_EQ(backward(p, 8, NAN, false).dweight, std::vector<float>(97 * 13, 0.0f));
}

TEST_P(CrossEntropyTest, GradientsMatchFiniteDifferences) {
  for (const auto& [tokens, width, vocabulary] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 2, 2}, {6, 3, 17}, {9, 5, 37}}) {
    const Problem p = make_problem(tokens, width, vocabulary);
    const auto expected_dh = numeric_gradient(
        [&](const auto& x) { return reference(p, x, doubles(p.weight)).sums.weighted; }, doubles(p.hidden));
    auto expected_dw = numeric_gradient([&](const auto& x) { return reference(p, doubles(p.hidden), x).sums.weighted; },
                                        doubles(p.weight));
    for (double& value : expected_dw) value += 0.5;
    for (const int64_t chunk : {1, 4, 100}) {
      SCOPED_TRACE(::testing::Message() << tokens << "x" << width << "x" << vocabulary << " by " << chunk);
      const Run run = backward(p, chunk, 0.5f);  // dweight accumulates
      expect_close(run.dhidden, expected_dh, loss_tolerance(), "dhidden");
      expect_close(run.dweight, expected_dw, loss_tolerance(), "dweight");
    }
  }
}

// Each rank has some rows of the weight. One after the other here: in a first round each notes what it would tell the
// others, in the second it hears it.
TEST_P(CrossEntropyTest, PartsOfTheVocabularyGiveTheLossOfTheWhole) {
  const Problem p = make_problem(67, 13, 97);
  const Run whole = backward(p, 16);
  for (const int ranks : {2, 3}) {
    std::vector<std::vector<std::vector<float>>> told(static_cast<size_t>(ranks));
    std::vector<double> dhidden(p.hidden.size());
    std::vector<float> dweight;
    for (const bool first_round : {true, false}) {
      for (int rank = 0; rank < ranks; ++rank) {
        const int64_t begin = p.vocabulary * rank / ranks, end = p.vocabulary * (rank + 1) / ranks;
        const std::vector<float> rows(p.weight.begin() + begin * p.width, p.weight.begin() + end * p.width);
        size_t call = 0;
        const VocabularyPart part{begin, p.vocabulary, ranks, rank, [&](TensorView all) {
                                    const HostCopy values(all);
                                    float* own = values.view().f32() + rank * all.dim(1);
                                    auto& noted = told[static_cast<size_t>(rank)];
                                    if (first_round) noted.emplace_back(own, own + all.dim(1));
                                    for (int other = 0; !first_round && other < ranks; ++other)
                                      std::ranges::copy(told[static_cast<size_t>(other)][call],
                                                        values.view().f32() + other * all.dim(1));
                                    values.store();
                                    ++call;
                                  }};
        const TensorView losses = filled_f32({p.tokens}, NAN), dh = filled({p.tokens, p.width}, NAN),
                         dw = filled_f32({end - begin, p.width}, NAN);
        const HostMemory memory(sizeof(LossSums), exec().device);
        auto* sums = static_cast<LossSums*>(memory.data());
        loss_forward_backward(exec(), tensor(p.hidden, {p.tokens, p.width}), tensor(rows, {end - begin, p.width}),
                              tensor(p.labels, {p.tokens}), floats(p.weights, {p.tokens}), 16, losses, dh, dw, sums,
                              p.labels, /*accumulate=*/false, part);
        const std::vector<float> gradient = host(dh), own = host(dw);
        if (first_round) continue;
        EXPECT_EQ(call, told[0].size());
        expect_sums(*sums, whole.sums, loss_tolerance());
        expect_close(host(losses), doubles(whole.token_loss), loss_tolerance(), "token loss");
        for (size_t i = 0; i < dhidden.size(); ++i) dhidden[i] += gradient[i];
        dweight.insert(dweight.end(), own.begin(), own.end());
      }
    }
    expect_close(whole.dhidden, dhidden, loss_tolerance(), "dhidden");
    expect_close(dweight, doubles(whole.dweight), loss_tolerance(), "dweight");
  }
}

TEST_P(CrossEntropyTest, LongIgnoredStretchesAreSkippedExactly) {
  // Prompts and answers in turn: what is skipped must still be written as zero, and what is counted must not change.
  Problem p = make_problem(400, 7, 31);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const bool counts = (t >= 90 && t < 95) || (t >= 126 && t < 129) || (t >= 161 && t < 300) || t == 398;
    p.labels[t] = counts ? static_cast<int32_t>(t % 31) : kIgnoredLabel;
  }
  const Expected expected = reference(p);
  for (const int64_t chunk : {16, 64, 1000}) {
    SCOPED_TRACE(chunk);
    const Run run = backward(p, chunk);
    expect_sums(run.sums, expected.sums, loss_tolerance());
    expect_close(run.token_loss, expected.token_loss, loss_tolerance(), "token loss");
    std::vector<double> dw(static_cast<size_t>(p.vocabulary * p.width));
    for (int64_t t = 0; t < p.tokens; ++t) {
      double largest = 0;
      for (int64_t i = 0; i < p.width; ++i) largest = std::max<double>(largest, std::abs(run.dhidden[t * p.width + i]));
      EXPECT_EQ(largest == 0, p.labels[t] == kIgnoredLabel) << t;
    }
    const Run whole = backward(p, p.tokens);
    expect_close(run.dweight, doubles(whole.dweight), tolerance(1e-5), "dweight");
  }
}

TEST_P(CrossEntropyTest, NothingToCount) {
  Problem p = make_problem(40, 3, 5);
  p.labels.assign(40, kIgnoredLabel);
  const Run run = backward(p, 8, 2.0f);
  expect_sums(run.sums, {}, 0);
  EXPECT_EQ(run.token_loss, std::vector<float>(40, 0.0f));
  EXPECT_EQ(run.dhidden, std::vector<float>(120, 0.0f));
  EXPECT_EQ(run.dweight, std::vector<float>(15, 2.0f));
  const Run none = backward(make_problem(0, 3, 5), 8, 1.0f);
  expect_sums(none.sums, {}, 0);
  EXPECT_EQ(none.dweight, std::vector<float>(15, 1.0f));
}

TEST_P(CrossEntropyTest, WeightZeroCountsButTeachesNothing) {
  Problem p = make_problem(5, 3, 7);
  p.labels.assign(5, 1);
  p.weights.assign(5, 0.0f);
  const Run run = backward(p, 2);
  EXPECT_EQ(run.sums.targets, 5);
  EXPECT_GT(run.sums.nll, 0);
  EXPECT_EQ(run.sums.weighted, 0);
  for (const float value : run.dhidden) EXPECT_EQ(value, 0.0f);
}

TEST_P(CrossEntropyTest, HugeLogitsDoNotOverflow) {
  // Logits of ±1e5 and more: one class holds all the mass.
  const Problem p = make_problem(33, 4, 19, 1e5);
  const Expected expected = reference(p);
  const Run run = backward(p, 8);
  expect_sums(run.sums, expected.sums, loss_tolerance());
  expect_close(run.token_loss, expected.token_loss, loss_tolerance(), "token loss");
  for (const float value : run.dhidden) EXPECT_TRUE(std::isfinite(value));
  for (const float value : run.dweight) EXPECT_TRUE(std::isfinite(value));
}

TEST_P(CrossEntropyTest, ConstantLogitsGiveLogOfTheVocabulary) {
  Problem p = make_problem(3, 2, 50021);
  p.hidden.assign(6, 0.0f);
  p.labels = {0, 50020, 17};
  const Run run = forward(p, 2);
  for (const float loss : run.token_loss) EXPECT_NEAR(loss, std::log(50021.0), 1e-5);
  EXPECT_EQ(run.sums.correct, 0);  // all are alike: a model of zeros knows nothing
}

TEST_P(CrossEntropyTest, NonFiniteInputIsNotHidden) {
  Problem p = make_problem(4, 2, 40);
  p.labels = {1, 2, 3, 4};
  p.hidden[5] = NAN;
  EXPECT_TRUE(std::isnan(forward(p, 4).sums.nll));
  p.hidden[5] = INFINITY;
  EXPECT_FALSE(std::isfinite(forward(p, 4).sums.nll));
}

TEST_P(CrossEntropyTest, TokenLossesAreOptionalAndScratchIsReturned) {
  const Problem p = make_problem(10, 3, 11);
  const TensorView hidden = tensor(p.hidden, {10, 3}), weight = tensor(p.weight, {11, 3}),
                   labels = tensor(p.labels, {10}), weights = floats(p.weights, {10});
  // As much as promised, no more.
  Arena scratch = make_arena("loss", loss_scratch_bytes(exec().device, dtype(), 11, 4), exec().device);
  Exec tight = exec();
  tight.scratch = &scratch;
  const HostMemory memory(2 * sizeof(LossSums), exec().device);
  auto* sums = static_cast<LossSums*>(memory.data());
  loss_forward(tight, hidden, weight, labels, weights, 4, {}, sums);
  const TensorView dhidden = filled({10, 3}, NAN), dweight = filled_f32({11, 3}, 0);
  loss_forward_backward(tight, hidden, weight, labels, weights, 4, {}, dhidden, dweight, sums + 1);
  EXPECT_EQ(scratch.used(), 0);
  host(dhidden);  // waits
  expect_sums(sums[0], reference(p).sums, loss_tolerance());
  expect_sums(sums[1], reference(p).sums, loss_tolerance());
}

// What lay in the scratch memory before does not matter: no logit is read that no product wrote.
TEST_P(CrossEntropyTest, ReadsNothingItDidNotWrite) {
  const Problem p = make_problem(67, 64, 1000);
  const Run expected = backward(p, 16);
  const TensorView all = exec().scratch->allocate(DType::i32, {exec().scratch->capacity() / 4});
  const HostCopy poison(all);
  std::fill_n(poison.view().as<int32_t>(), poison.view().elements(), -1);  // NaN in either type
  poison.store();
  exec().scratch->release(0);
  const Run got = backward(p, 16);
  EXPECT_TRUE(std::isfinite(got.sums.weighted));
  EXPECT_EQ(got.token_loss, expected.token_loss);
  EXPECT_EQ(got.dhidden, expected.dhidden);
  EXPECT_EQ(got.dweight, expected.dweight);
}

TEST_P(CrossEntropyTest, RealVocabularyInBothPasses) {
  // 16-byte accesses, rows longer than a block's first turn.
  const Problem p = make_problem(37, 64, 12000, 0.3);
  const Expected expected = reference(p);
  const Run a = forward(p, 16), b = backward(p, 16);
  expect_sums(a.sums, expected.sums, loss_tolerance());
  expect_close(a.token_loss, expected.token_loss, loss_tolerance(), "token loss");
  EXPECT_EQ(a.token_loss, b.token_loss);
  // Gradients of the logits of a row sum to zero, hence so do those of the weights over the vocabulary.
  for (int64_t i = 0; i < p.width; ++i) {
    double sum = 0, size = 0;
    for (int64_t v = 0; v < p.vocabulary; ++v) {
      sum += b.dweight[v * p.width + i];
      size += std::abs(b.dweight[v * p.width + i]);
    }
    EXPECT_NEAR(sum / size, 0, tolerance(1e-5, 2)) << i;
  }
}

TEST_P(CrossEntropyTest, RefusesWrongInput) {
  Problem p = make_problem(4, 3, 5);
  for (const int32_t unknown : {5, -1}) {
    p.labels[1] = unknown;
    if (on_cuda())  // nobody looks at the labels on the host
      EXPECT_TRUE(std::isnan(forward(p, 2).sums.nll));
    else
      EXPECT_THROW(forward(p, 2), InternalError);
  }
  p.labels[1] = 0;
  EXPECT_THROW(forward(p, 0), InternalError);
  const TensorView hidden = tensor(p.hidden, {4, 3}), weight = tensor(p.weight, {5, 3}), labels = tensor(p.labels, {4}),
                   weights = floats(p.weights, {4}), dweight = filled_f32({5, 3}, 0);
  LossSums sums;
  EXPECT_THROW(loss_forward(exec(), hidden, weight, weights, weights, 2, {}, &sums), InternalError);
  EXPECT_THROW(loss_forward_backward(exec(), hidden, weight, labels, weights, 2, {}, hidden, dweight, &sums),
               InternalError);
  if (on_cuda()) {
    EXPECT_THROW(loss_forward(exec(), hidden, weight, labels, weights, 2, {}, &sums, std::span(p.labels).first(3)),
                 InternalError);
  }
}

}  // namespace
}  // namespace sb::test
