#include "device/memory.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device/context.h"
#include "device/cuda.h"
#include "device/event.h"

namespace sb {
namespace {

class MemoryTest : public testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::cuda && !cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
};

std::vector<DeviceKind> devices() {
#ifdef SB_TEST_CUDA
  return {DeviceKind::cpu, DeviceKind::cuda};
#else
  return {DeviceKind::cpu};
#endif
}

INSTANTIATE_TEST_SUITE_P(Devices, MemoryTest, testing::ValuesIn(devices()),
                         [](const auto& device) { return device.param == DeviceKind::cpu ? "cpu" : "cuda"; });

TEST_P(MemoryTest, CopiesZerosAndTheWayBack) {
  ThreadPool pool(2);
  const DeviceContext context(GetParam(), pool);
  Arena arena = make_arena("test", 1 << 16, GetParam());
  const TensorView a = arena.allocate(DType::i32, {1003}), b = arena.allocate(DType::i32, {1003});
  EXPECT_EQ(a.device(), GetParam());
  const HostCopy staged(a);
  for (int32_t i = 0; i < 1003; ++i) staged.view().as<int32_t>()[i] = i;
  staged.store();
  copy_tensor(context.exec(), a, b);
  zero_tensor(context.exec(), a.rows(0, 500));
  const HostCopy first(a), second(b);
  for (int32_t i = 0; i < 1003; ++i) {
    EXPECT_EQ(first.view().as<int32_t>()[i], i < 500 ? 0 : i);
    EXPECT_EQ(second.view().as<int32_t>()[i], i);
  }
  EXPECT_THROW(copy_tensor(context.exec(), a, b.rows(0, 7)), InternalError);
}

TEST_P(MemoryTest, AnArenaWithoutCapacityHandsOutNothing) {
  Arena arena = make_arena("none", 0, GetParam());
  EXPECT_EQ(arena.capacity(), 0);
  EXPECT_THROW(arena.allocate(DType::f32, {1}), OutOfMemory);
}

TEST_P(MemoryTest, EventsAreInOrder) {
  ThreadPool pool(1);
  const DeviceContext context(GetParam(), pool);
  DeviceEvent begin(GetParam()), end(GetParam());
  end.wait();  // nothing recorded: returns
  EXPECT_THROW(DeviceEvent::milliseconds_between(begin, end), InternalError);
  begin.record(context.exec());
  Arena arena = make_arena("test", 1 << 20, GetParam());
  zero_tensor(context.exec(), arena.allocate(DType::f32, {1 << 18}));
  end.record(context.exec());
  end.wait();
  EXPECT_GE(DeviceEvent::milliseconds_between(begin, end), 0);
}

TEST_P(MemoryTest, HostMemoryTravelsOnTheStream) {
  if (GetParam() == DeviceKind::cpu) {
    const HostMemory memory(64, DeviceKind::cpu);
    EXPECT_EQ(static_cast<char*>(memory.data())[63], 0);
    return;
  }
  ThreadPool pool(1);
  const DeviceContext context(GetParam(), pool);
  const HostMemory memory(4000, GetParam());
  Arena arena = make_arena("test", 4096, GetParam());
  const TensorView tensor = arena.allocate(DType::f32, {1000});
  for (int i = 0; i < 1000; ++i) static_cast<float*>(memory.data())[i] = static_cast<float>(i);
  upload(context.exec(), memory.data(), tensor);
  EXPECT_EQ(HostCopy(tensor).view().f32()[999], 999.0f);
}

TEST_P(MemoryTest, TooMuchIsRefusedWithTheName) {
  if (GetParam() == DeviceKind::cpu) GTEST_SKIP() << "the system may promise what it does not have";
  try {
    make_arena("activations", int64_t{1} << 45, GetParam());
    FAIL() << "32 TiB on one GPU";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("activations"), std::string::npos);
  }
  EXPECT_GT(cuda::device_info().free_bytes, 0);  // and the device still works
}

#ifndef SB_TEST_CUDA
TEST(WithoutCuda, AContextSaysHowToGetIt) {
  ThreadPool pool(1);
  EXPECT_FALSE(cuda::problem().empty());
  try {
    DeviceContext context(DeviceKind::cuda, pool);
    FAIL() << "a context on CUDA";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("built without CUDA"), std::string::npos);
  }
}
#endif

}  // namespace
}  // namespace sb
