#include "ops/dropout.h"

#include "ops/random/dropout_bits.h"
#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

class DropoutTest : public OpsTest {
 protected:
  DropoutRows rows(double probability, uint64_t key, uint32_t stream, const std::vector<int32_t>& sequences,
                   const std::vector<int32_t>& positions) {
    const auto count = static_cast<int64_t>(sequences.size());
    return {probability, key, stream, tensor(sequences, {count}), tensor(positions, {count})};
  }
};
SB_INSTANTIATE_ON_ALL_DEVICES(DropoutTest);

// Straight from its description, with the generator of core/random.h.
bool dropped(double probability, uint64_t key, uint32_t stream, int32_t sequence, int32_t position, int64_t channel) {
  const auto group = static_cast<uint64_t>(channel / 8);
  const auto bits = Random::block(key, uint64_t{static_cast<uint32_t>(position)} << 32 | group,
                                  uint64_t{stream} << 32 | static_cast<uint32_t>(sequence));
  const uint32_t word = bits[static_cast<size_t>(channel % 8 / 2)];
  return (channel % 2 == 0 ? word & 0xFFFF : word >> 16) < std::lround(probability * 65536);
}

TEST_P(DropoutTest, KeepsWhatTheGeneratorSays) {
  const std::vector<int32_t> sequences = {4, 4, -7, 1000000000}, positions = {0, 1, 70000, 3};
  for (const int64_t width : {1, 8, 13, 40, 1025}) {
    const auto x = random_operand(4 * width, 1), before = random_operand(4 * width, 2);
    for (const double probability : {0.0, 0.05, 0.5, 0.9}) {
      const DropoutRows how = rows(probability, 0x123456789abcdef, 17, sequences, positions);
      const float scale = static_cast<float>(65536.0 / (65536.0 - std::round(probability * 65536)));
      std::vector<double> kept, added;
      for (int64_t i = 0; i < 4 * width; ++i) {
        const auto at = static_cast<size_t>(i);
        const auto row = static_cast<size_t>(i / width);
        kept.push_back(dropped(probability, 0x123456789abcdef, 17, sequences[row], positions[row], i % width)
                           ? 0.0
                           : double{scale} * x[at]);
        added.push_back(before[at] + kept.back());
      }
      const TensorView to = filled({4, width}, NAN), sum = tensor(before, {4, width});
      dropout(exec(), how, tensor(x, {4, width}), to);
      expect_close(host(to), kept, tolerance(1e-6), "dropout");
      add_dropout(exec(), how, tensor(x, {4, width}), sum);
      expect_close(host(sum), added, tolerance(1e-6), "add_dropout");
    }
  }
}

TEST_P(DropoutTest, DropsItsShareAndKeepsTheMean) {
  constexpr int64_t kRows = 64, kWidth = 512;
  std::vector<int32_t> sequences(kRows, 3), positions(kRows);
  for (int64_t i = 0; i < kRows; ++i) positions[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  const TensorView to = filled({kRows, kWidth}, 0);
  dropout(exec(), rows(0.25, 9, 2, sequences, positions), filled({kRows, kWidth}, 1.0f), to);
  double zeros = 0, sum = 0;
  for (const float value : host(to)) {
    zeros += value == 0 ? 1 : 0;
    sum += value;
  }
  const double count = kRows * kWidth;
  EXPECT_NEAR(zeros / count, 0.25, 0.01);  // four standard deviations
  EXPECT_NEAR(sum / count, 1.0, 0.015);
}

TEST_P(DropoutTest, NoRows) {
  const TensorView none = tensor(std::vector<float>(), {0, 8});
  dropout(exec(), rows(0.5, 1, 1, {}, {}), none, none);
}

TEST(DropoutKey, DependsOnSeedAndStep) {
  EXPECT_NE(dropout_key(1, 1), dropout_key(1, 2));
  EXPECT_NE(dropout_key(1, 1), dropout_key(2, 1));
  EXPECT_EQ(dropout_key(3, 4), dropout_key(3, 4));
}

}  // namespace
}  // namespace sb::test
