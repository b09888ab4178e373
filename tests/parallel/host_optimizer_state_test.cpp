// Values and moments in host memory: the bits of an update that has everything on the device.
#include "parallel/host_optimizer_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
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

class HostOptimizerStateTest : public testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::cuda && !cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, HostOptimizerStateTest, testing::Values(DeviceKind::cpu, DeviceKind::cuda));

void expect_windows_have_the_bits_of_one(DeviceKind device, DType moments, int64_t elements, int64_t window) {
  ThreadPool pool(2);
  const DeviceContext context(device, pool, norm_scratch_bytes(device));
  const Exec& exec = context.exec();
  HostOptimizerState state(elements, device, moments, window);
  const std::vector<float> start = random_values(elements, 1);
  std::ranges::copy(start, state.values().f32());
  Arena memory = make_arena("whole", 5 * Arena::rounded(4 * elements), device);
  const auto array = [&](const std::vector<float>& from) {
    const TensorView to = memory.allocate(DType::f32, {elements});
    const HostCopy copy(to);
    std::ranges::copy(from, copy.view().f32());
    copy.store();
    return to;
  };
  const auto zeros = [&] {
    const TensorView to = memory.allocate(moments, {elements});
    zero_now(to);
    return to;
  };
  const TensorView values = array(start), m = zeros(), v = zeros();
  const int64_t kept = memory.mark();
  const auto update = [&](const AdamWStep& step, int64_t begin, const AdamWBuffers& buffers) {
    const DecayRange range = {0, buffers.parameters.elements(), true, {.tensor = 5, .first = begin}};
    adamw_update(exec, step, std::span(&range, 1), buffers);
  };
  for (int64_t number = 1; number <= 4; ++number) {
    const TensorView gradients = array(random_values(elements, 1 + static_cast<uint64_t>(number)));
    const AdamWStep step{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, number, 0.7f};
    update(step, 0, {values, gradients, m, v, {}, {}});
    // Two ranges, as two buckets would come: on borders of vectors, off which a GPU takes elements one by one and may
    // join other products.
    const int64_t border = elements / 3 / 64 * 64;
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, border}, {border, elements}})
      state.update(exec, begin, end, [&](const HostOptimizerState::Window& part) {
        update(step, part.begin,
               {part.values, gradients.rows(part.begin, part.end), part.first_moment, part.second_moment, {}, {}});
      });
    context.synchronize();
    memory.release(kept);
  }
  const auto expect_same = [&](const TensorView& host, const TensorView& whole) {
    EXPECT_EQ(host.dtype(), whole.dtype());
    EXPECT_EQ(std::memcmp(host.raw(), HostCopy(whole).view().raw(), static_cast<size_t>(whole.bytes())), 0);
  };
  expect_same(state.values(), values);
  expect_same(state.first_moment(), m);
  expect_same(state.second_moment(), v);
}

TEST_P(HostOptimizerStateTest, UpdatesInWindowsHaveTheBitsOfOne) {
  for (const DType moments : {DType::f32, DType::bf16})
    for (const auto& [elements, window] :
         {std::pair<int64_t, int64_t>{1, 8}, {5003, 1000}, {4096, 4096}, {70001, 64}}) {
      SCOPED_TRACE(testing::Message() << elements << " elements in windows of " << window << ", moments in "
                                      << dtype_name(moments));
      expect_windows_have_the_bits_of_one(GetParam(), moments, elements, window);
    }
}

TEST(HostOptimizerState, PlansWhatItTakes) {
  EXPECT_EQ(HostOptimizerState::host_bytes(1 << 20), 3 * (4 << 20));
  EXPECT_EQ(HostOptimizerState::device_bytes(1 << 20), 9 * (4 << 20));
  EXPECT_EQ(HostOptimizerState::device_bytes(int64_t{1} << 30), 9 * 4 * HostOptimizerState::kWindow);
  EXPECT_EQ(HostOptimizerState::host_bytes(1 << 20, DType::bf16), 8 << 20);
  EXPECT_EQ(HostOptimizerState::device_bytes(1 << 20, DType::bf16), 3 * (8 << 20));
  HostOptimizerState state(100, DeviceKind::cpu);
  EXPECT_EQ(state.values().elements(), 100);
  EXPECT_EQ(*std::max_element(state.first_moment().f32(), state.first_moment().f32() + 100), 0.0f);
  ThreadPool pool(1);
  const DeviceContext context(DeviceKind::cpu, pool, 0);
  EXPECT_THROW(state.update(context.exec(), 50, 101, [](const auto&) {}), InternalError);
}

}  // namespace
}  // namespace sb
