#include "device/memory.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/context.h"
#include "device/cuda.h"
#include "device/cuda_products.h"
#include "device/event.h"
#include "tests/core/message_of.h"

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

TEST_P(MemoryTest, PiecesOfOddSizesTravelAloneAndLeaveTheirNeighbours) {
  for (const int threads : {1, 3, 8}) {
    ThreadPool pool(threads);
    const DeviceContext context(GetParam(), pool);
    Arena arena = make_arena("test", 1 << 18, GetParam());
    constexpr int64_t kAll = 9000;
    const TensorView from = arena.allocate(DType::i32, {kAll}), to = arena.allocate(DType::i32, {kAll});
    const HostCopy staged(from);
    for (int32_t i = 0; i < kAll; ++i) staged.view().as<int32_t>()[i] = 7 * i + 1;
    staged.store();
    for (const int64_t count : {0, 1, 2, 15, 16, 17, 1023, 8191}) {
      zero_now(to);
      copy_tensor(context.exec(), from.rows(3, 3 + count), to.rows(5, 5 + count));
      context.synchronize();
      const HostCopy result(to);
      for (int64_t i = 0; i < kAll; ++i) {
        const int64_t expected = i >= 5 && i < 5 + count ? 7 * (i - 2) + 1 : 0;
        ASSERT_EQ(result.view().as<int32_t>()[i], expected) << count << " on " << threads << " at " << i;
      }
    }
  }
}

TEST_P(MemoryTest, UploadAndDownloadAreEachOthersInverse) {
  ThreadPool pool(2);
  const DeviceContext context(GetParam(), pool);
  Arena arena = make_arena("test", 1 << 16, GetParam());
  for (const int64_t count : {0, 1, 3, 777}) {
    const TensorView tensor = arena.allocate(DType::i64, {count});
    const HostMemory there(8 * count, GetParam()), back(8 * count, GetParam());
    EXPECT_EQ(there.data() == nullptr, count == 0);
    for (int64_t i = 0; i < count; ++i) static_cast<int64_t*>(there.data())[i] = (i << 40) - i;
    upload(context.exec(), there.data(), tensor);
    download(context.exec(), tensor, back.data());
    context.synchronize();
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(static_cast<int64_t*>(back.data())[i], (i << 40) - i) << count;
  }
}

TEST_P(MemoryTest, WhatIsElsewhereIsRefused) {
  ThreadPool pool(1);
  const DeviceContext context(GetParam(), pool);
  float memory[4] = {1, 2, 3, 4};
  const DeviceKind other = GetParam() == DeviceKind::cpu ? DeviceKind::cuda : DeviceKind::cpu;
  const TensorView here(memory, DType::f32, {4}, GetParam()), there(memory, DType::f32, {4}, other);
  const Exec& exec = context.exec();
  EXPECT_THROW(copy_tensor(exec, here, there), InternalError);
  EXPECT_THROW(copy_tensor(exec, there, here), InternalError);
  EXPECT_THROW(upload(exec, memory, there), InternalError);
  EXPECT_THROW(download(exec, there, memory), InternalError);
  EXPECT_THROW(zero_tensor(exec, there), InternalError);
  EXPECT_EQ(memory[0], 1.0f);
  // Onto itself: nothing to do.
  EXPECT_NO_THROW(copy_tensor(exec, here, here));
  EXPECT_EQ(memory[3], 4.0f);
}

TEST_P(MemoryTest, ACopyThatIsNoTensors) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::i64}) {
    const HostCopy copy(dtype, {3, 5});
    EXPECT_EQ(copy.view().shape(), Shape({3, 5}));
    EXPECT_EQ(copy.view().dtype(), dtype);
    EXPECT_EQ(copy.view().device(), DeviceKind::cpu);
    for (int64_t i = 0; i < copy.view().bytes(); ++i) ASSERT_EQ(static_cast<char*>(copy.view().raw())[i], 0);
    EXPECT_NO_THROW(copy.store());
  }
  EXPECT_EQ(HostCopy(DType::f32, {0, 5}).view().elements(), 0);
}

TEST_P(MemoryTest, AContextHandsItsPartsDown) {
  ThreadPool pool(3);
  const DeviceContext context(GetParam(), pool, 1000), bare(GetParam(), pool);
  const Exec& exec = context.exec();
  EXPECT_EQ(exec.device, GetParam());
  EXPECT_EQ(exec.pool, &pool);
  EXPECT_EQ(exec.stream != nullptr, GetParam() == DeviceKind::cuda);
  EXPECT_EQ(exec.products != nullptr, GetParam() == DeviceKind::cuda);
  EXPECT_EQ(exec.scratch->capacity(), 1024);
  EXPECT_EQ(exec.scratch->allocate(DType::f32, {2}).device(), GetParam());
  EXPECT_EQ(bare.exec().scratch->capacity(), 0);
  EXPECT_NO_THROW(context.synchronize());
}

// Copies of an event are the same point; those of a pool can be taken and given back by any thread, also after it.
TEST_P(MemoryTest, EventsOfAPool) {
  ThreadPool pool(1);
  const DeviceContext context(GetParam(), pool);
  std::vector<DeviceEvent> left;
  {
    DeviceEventPool events(GetParam(), 2);
    for (int i = 0; i < 5; ++i) left.push_back(events.take());  // more than were made
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) {
          DeviceEvent event = events.take();
          const DeviceEvent before = event;
          event.record(context.exec());
          event.wait();
          EXPECT_TRUE(event.passed());
          EXPECT_TRUE(before.passed());
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
  for (DeviceEvent& event : left) {
    EXPECT_TRUE(event.passed()) << "nothing was recorded";
    event.hold(context.exec());
    event.record(context.exec());
    event.hold(context.exec());
    event.wait();
    EXPECT_TRUE(event.passed());
  }
}

TEST_P(MemoryTest, TimesBetweenEventsAddUp) {
  ThreadPool pool(1);
  const DeviceContext context(GetParam(), pool);
  std::vector<DeviceEvent> events(3, DeviceEvent(DeviceKind::cpu));
  for (DeviceEvent& event : events) {
    event = DeviceEvent(GetParam());
    event.record(context.exec());
  }
  events[2].wait();
  const double first = DeviceEvent::milliseconds_between(events[0], events[1]),
               second = DeviceEvent::milliseconds_between(events[1], events[2]),
               both = DeviceEvent::milliseconds_between(events[0], events[2]);
  EXPECT_GE(first, 0);
  EXPECT_GE(second, 0);
  EXPECT_NEAR(both, first + second, 0.01 + 1e-3 * both);
  EXPECT_EQ(DeviceEvent::milliseconds_between(events[1], events[1]), 0);
  EXPECT_THROW(DeviceEvent::milliseconds_between(events[0], DeviceEvent(GetParam())), InternalError);
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

// Nothing of a build without CUDA pretends to work.
TEST(WithoutCuda, EverythingRefusesWithTheCure) {
  int value = 0;
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"require_device", [] { cuda::require_device(); }},
      {"device_info", [] { cuda::device_info(); }},
      {"device_count", [] { cuda::device_count(); }},
      {"use_device", [] { cuda::use_device(0); }},
      {"current_device", [] { cuda::current_device(); }},
      {"allocate", [] { cuda::allocate("x", 1); }},
      {"allocate_host", [] { cuda::allocate_host(1); }},
      {"copy", [&] { cuda::copy(nullptr, &value, &value, 4); }},
      {"zero", [&] { cuda::zero(nullptr, &value, 4); }},
      {"copy_and_wait", [&] { cuda::copy_and_wait(&value, &value, 4); }},
      {"zero_and_wait", [&] { cuda::zero_and_wait(&value, 4); }},
      {"make_stream", [] { cuda::make_stream(); }},
      {"synchronize", [] { cuda::synchronize(nullptr); }},
      {"make_event", [] { cuda::make_event(); }},
      {"products", [] { CudaProducts products; }},
      {"arena", [] { make_arena("x", 1, DeviceKind::cuda); }},
      {"host memory", [] { HostMemory memory(1, DeviceKind::cuda); }},
      {"event", [] { DeviceEvent event(DeviceKind::cuda); }},
      {"events", [] { DeviceEventPool events(DeviceKind::cuda, 1); }},
      {"copy of a tensor", [&] { HostCopy copy(TensorView(&value, DType::i32, {1}, DeviceKind::cuda)); }},
  };
  for (const auto& [name, call] : calls) {
    const std::string message = message_of(call);
    EXPECT_NE(message.find("built without CUDA"), std::string::npos) << name << ": " << message;
    EXPECT_NE(message.find("device: cpu"), std::string::npos) << name << ": " << message;
  }
  EXPECT_EQ(cuda::processes(), -1) << "nobody tells";
  EXPECT_EQ(cuda::allocations(), cuda::Allocations());
}
#endif

}  // namespace
}  // namespace sb
