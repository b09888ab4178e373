#include "ops/embedding.h"

#include "tests/ops/ops_fixture.h"

namespace sb::testing {
namespace {

class EmbeddingTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(EmbeddingTest);

TEST_P(EmbeddingTest, ForwardCopiesRows) {
  for (const int64_t width : {1, 3, 17, 64}) {
    const auto table = random_values(11 * width, 1);
    const std::vector<int32_t> tokens = {10, 0, 3, 3, 7};
    const TensorView x = filled({5, width}, NAN);
    embedding_forward(exec(), tensor(tokens, {5}), tensor(table, {11, width}), x);
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t i = 0; i < width; ++i) EXPECT_EQ(host(x)[t * width + i], table[tokens[t] * width + i]);
    }
  }
}

TEST_P(EmbeddingTest, BackwardSumsTokensInOrderAndKeepsTheRest) {
  for (const int64_t width : {1, 3, 16, 17, 33, 130}) {
    const int64_t tokens = 53, vocabulary = 7;
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) ids[t] = static_cast<int32_t>((t * t) % (vocabulary - 1));  // 6 never
    const auto dx = random_values(tokens * width, 1);
    std::vector<float> expected = random_values(vocabulary * width, 2);
    const TensorView dtable = tensor(expected, {vocabulary, width});
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < width; ++i) expected[ids[t] * width + i] += dx[t * width + i];
    }
    embedding_backward(exec(), tensor(ids, {tokens}), tensor(dx, {tokens, width}), dtable);
    EXPECT_EQ(host(dtable), expected);  // the same bits for any number of threads
  }
}

TEST_P(EmbeddingTest, NoTokens) {
  const TensorView none = filled({0, 4}, 0), table = filled({3, 4}, 1), ids = tensor(std::vector<int32_t>{}, {0});
  embedding_forward(exec(), ids, table, none);
  embedding_backward(exec(), ids, none, table);
  EXPECT_EQ(host(table), std::vector<float>(12, 1.0f));
}

TEST_P(EmbeddingTest, RefusesWrongShapes) {
  const TensorView ids = tensor(std::vector<int32_t>{0, 1}, {2});
  EXPECT_THROW(embedding_forward(exec(), ids, filled({3, 4}, 0), filled({2, 5}, 0)), InternalError);
  EXPECT_THROW(embedding_forward(exec(), ids, filled({3, 4}, 0), filled({3, 4}, 0)), InternalError);
  EXPECT_THROW(embedding_forward(exec(), filled({2}, 0), filled({3, 4}, 0), filled({2, 4}, 0)), InternalError);
  EXPECT_THROW(embedding_backward(exec(), ids, filled({2, 4}, 0), filled({3, 5}, 0)), InternalError);
}

}  // namespace
}  // namespace sb::testing
