// Values and moments in host memory: the bits of an update that has everything on the device.
#include "parallel/host_optimizer_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/random.h"
#include "device/context.h"
#include "device/cuda.h"
#include "ops/adamw.h"

namespace sb {
namespace {

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.normal());
  return values;
}

TensorView view_of(std::vector<float>& values) {
  return {values.data(), {std::ssize(values)}};
}

class HostOptimizerStateTest : public testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::cuda && !cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, HostOptimizerStateTest, testing::Values(DeviceKind::cpu, DeviceKind::cuda));

TEST_P(HostOptimizerStateTest, UpdatesInWindowsHaveTheBitsOfOne) {
  ThreadPool pool(2);
  const DeviceContext context(GetParam(), pool, norm_scratch_bytes(GetParam()));
  const Exec& exec = context.exec();
  for (const auto& [elements, window] : {std::pair<int64_t, int64_t>{1, 8}, {5003, 1000}, {4096, 4096}, {70001, 64}}) {
    SCOPED_TRACE(testing::Message() << elements << " elements in windows of " << window);
    HostOptimizerState state(elements, GetParam(), window);
    const std::vector<float> start = random_values(elements, 1);
    std::ranges::copy(start, state.values().f32());
    Arena memory = make_arena("whole", 5 * Arena::rounded(4 * elements), GetParam());
    const auto array = [&](const std::vector<float>& from) {
      const TensorView to = memory.allocate(DType::f32, {elements});
      const HostCopy copy(to);
      std::ranges::copy(from, copy.view().f32());
      copy.store();
      return to;
    };
    const std::vector<float> zeros(static_cast<size_t>(elements));
    const TensorView values = array(start), m = array(zeros), v = array(zeros);
    for (int64_t number = 1; number <= 4; ++number) {
      const TensorView gradients = array(random_values(elements, 1 + static_cast<uint64_t>(number)));
      const AdamWStep step{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, number, 0.7f};
      adamw_update(exec, step, values, gradients, m, v);
      // Two ranges, as two buckets would come.
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, elements / 3}, {elements / 3, elements}})
        state.update(exec, begin, end, [&](const HostOptimizerState::Window& part) {
          adamw_update(exec, step, part.values, gradients.rows(part.begin, part.end), part.first_moment,
                       part.second_moment);
        });
      context.synchronize();
      memory.release(3 * Arena::rounded(4 * elements));
    }
    const auto expect_same = [&](const TensorView& host, const TensorView& device) {
      const HostCopy copy(device);
      EXPECT_TRUE(std::equal(host.f32(), host.f32() + elements, copy.view().f32()));
    };
    expect_same(state.values(), values);
    expect_same(state.first_moment(), m);
    expect_same(state.second_moment(), v);
  }
}

TEST(HostOptimizerState, PlansWhatItTakes) {
  EXPECT_EQ(HostOptimizerState::host_bytes(1 << 20), 3 * (4 << 20));
  EXPECT_EQ(HostOptimizerState::device_bytes(1 << 20), 9 * (4 << 20));
  EXPECT_EQ(HostOptimizerState::device_bytes(int64_t{1} << 30), 9 * 4 * HostOptimizerState::kWindow);
  HostOptimizerState state(100, DeviceKind::cpu);
  EXPECT_EQ(state.values().elements(), 100);
  EXPECT_EQ(*std::max_element(state.first_moment().f32(), state.first_moment().f32() + 100), 0.0f);
  ThreadPool pool(1);
  const DeviceContext context(DeviceKind::cpu, pool, 0);
  EXPECT_THROW(state.update(context.exec(), 50, 101, [](const auto&) {}), InternalError);
}

}  // namespace
}  // namespace sb
