#include "ops/embedding.h"

#include "device/memory.h"
#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

class EmbeddingTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(EmbeddingTest);

TEST_P(EmbeddingTest, ForwardCopiesRows) {
  // The last is large enough to be shared between threads.
  for (const auto& [count, width] : {std::pair<int64_t, int64_t>{5, 1}, {5, 3}, {5, 17}, {3, 64}, {67, 1031}}) {
    const auto table = random_operand(11 * width, 1);
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < count; ++t) tokens.push_back(static_cast<int32_t>((10 + t * t) % 11));
    const TensorView x = filled({count, width}, NAN);
    embedding_forward(exec(), tensor(tokens, {count}), tensor(table, {11, width}), x);
    const std::vector<float> actual = host(x);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = 0; i < width; ++i) ASSERT_EQ(actual[t * width + i], table[tokens[t] * width + i]);
    }
  }
}

TEST_P(EmbeddingTest, BackwardSumsTokensInOrderAndKeepsTheRest) {
  for (const int64_t width : {1, 3, 16, 17, 33, 130, 896}) {
    const int64_t tokens = 53, vocabulary = 7;
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) ids[t] = static_cast<int32_t>((t * t) % (vocabulary - 1));  // 6 never
    const auto dx = random_operand(tokens * width, 1);
    std::vector<float> expected = random_values(vocabulary * width, 2);
    const TensorView dtable = floats(expected, {vocabulary, width});
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < width; ++i) expected[ids[t] * width + i] += dx[t * width + i];
    }
    embedding_backward(exec(), tensor(ids, {tokens}), tensor(dx, {tokens, width}), dtable);
    EXPECT_EQ(host(dtable), expected);  // the same bits for any number of threads
  }
}

// A table with some of the rows: tokens of the others are zero, and leave its gradient alone.
TEST_P(EmbeddingTest, APartOfTheVocabularyKnowsItsOwnTokens) {
  const int64_t width = 17, first = 3, rows = 5, vocabulary = 11;
  const auto table = random_operand(rows * width, 1);
  const std::vector<int32_t> ids = {10, 3, 0, 7, 8, 5, 3, 2, 7};
  const auto count = std::ssize(ids);
  const TensorView x = filled({count, width}, NAN), dtable = filled_f32({rows, width}, 0);
  embedding_forward(exec(), tensor(ids, {count}), tensor(table, {rows, width}), x, first);
  const std::vector<float> got = host(x);
  std::vector<float> expected(static_cast<size_t>(rows * width));
  for (int64_t t = 0; t < count; ++t)
    for (int64_t i = 0; i < width; ++i) {
      const int64_t row = ids[t] - first;
      const bool here = 0 <= row && row < rows;
      EXPECT_EQ(got[t * width + i], here ? table[row * width + i] : 0.0f) << t;
      if (here) expected[row * width + i] += table[row * width + i];
    }
  embedding_backward(exec(), tensor(ids, {count}), x, dtable, first, vocabulary);
  EXPECT_EQ(host(dtable), expected);
}

TEST_P(EmbeddingTest, BackwardOfManyTokensNeedsNoMoreScratchThanPromised) {
  const int64_t tokens = 20000, vocabulary = 5003, width = 8;
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  Random random(5);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(random.below(vocabulary) + 1));  // few are frequent
  const auto dx = random_operand(tokens * width, 1);
  std::vector<float> expected(static_cast<size_t>(vocabulary * width));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < width; ++i) expected[ids[t] * width + i] += dx[t * width + i];
  }
  Arena scratch = make_arena("embedding", embedding_scratch_bytes(exec().device, tokens), exec().device);
  Exec tight = exec();
  tight.scratch = &scratch;
  const TensorView dtable = filled_f32({vocabulary, width}, 0);
  embedding_backward(tight, tensor(ids, {tokens}), tensor(dx, {tokens, width}), dtable);
  EXPECT_EQ(host(dtable), expected);
  EXPECT_EQ(scratch.used(), 0);
}

TEST_P(EmbeddingTest, NoTokens) {
  const TensorView none = filled({0, 4}, 0), dtable = filled_f32({3, 4}, 1), ids = tensor(std::vector<int32_t>{}, {0});
  embedding_forward(exec(), ids, filled({3, 4}, 1), none);
  embedding_backward(exec(), ids, none, dtable);
  EXPECT_EQ(host(dtable), std::vector<float>(12, 1.0f));
}

TEST_P(EmbeddingTest, RefusesWrongShapes) {
  const TensorView ids = tensor(std::vector<int32_t>{0, 1}, {2});
  EXPECT_THROW(embedding_forward(exec(), ids, filled({3, 4}, 0), filled({2, 5}, 0)), InternalError);
  EXPECT_THROW(embedding_forward(exec(), ids, filled({3, 4}, 0), filled({3, 4}, 0)), InternalError);
  EXPECT_THROW(embedding_forward(exec(), filled({2}, 0), filled({3, 4}, 0), filled({2, 4}, 0)), InternalError);
  EXPECT_THROW(embedding_backward(exec(), ids, filled({2, 4}, 0), filled_f32({3, 5}, 0)), InternalError);
}

}  // namespace
}  // namespace sb::test
