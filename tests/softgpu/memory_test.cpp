// The software device's memory is stricter than a GPU's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "softgpu/interface/kernel.h"
#include "softgpu/interface/sanitizers.h"

namespace softgpu {
namespace {

template <typename T>
T* device_memory(size_t count) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
  return static_cast<T*>(memory);
}

template <typename T>
T* locked_memory(size_t count) {
  void* memory = nullptr;
  EXPECT_EQ(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocDefault), cudaSuccess);
  return static_cast<T*>(memory);
}

template <typename T>
std::vector<T> values_of(const T* device, size_t count) {
  std::vector<T> values(count);
  EXPECT_EQ(cudaMemcpy(values.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
  return values;
}

// What a thread of a kernel does.
void run_on_device(std::function<void()> body, cudaStream_t stream = nullptr) {
  Kernel kernel;
  kernel.body = std::move(body);
  kernel.library_name = "a kernel of the test";
  kernel.grid = kernel.block = dim3(1);
  kernel.stream = stream;
  ASSERT_EQ(enqueue_kernel(std::move(kernel)), cudaSuccess);
}

TEST(SoftgpuMemory, IsFullOfWhatSpoilsResults) {
  for (const size_t count : {size_t{3}, size_t{5} << 20}) {
    float* memory = device_memory<float>(count);
    for (const float value : values_of(memory, count)) ASSERT_TRUE(std::isnan(value));
    cudaFree(memory);
  }
}

TEST(SoftgpuMemory, GoesBothWays) {
  std::vector<int> values(100'000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i * i);
  int* memory = device_memory<int>(values.size());
  ASSERT_EQ(cudaMemcpy(memory, values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(values_of(memory, values.size()), values);
  cudaFree(memory);
}

TEST(SoftgpuMemory, IsAlignedAsPromisedAndNoMore) {
  std::vector<void*> all;
  bool more = true;
  for (size_t bytes = 1; bytes < 3000; bytes += 100) {
    all.push_back(device_memory<char>(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(all.back()) % 256, 0u);
    more = more && reinterpret_cast<uintptr_t>(all.back()) % 512 == 0;
  }
  EXPECT_FALSE(more);
  for (void* one : all) cudaFree(one);
}

TEST(SoftgpuMemoryDeathTest, TheHostsCodeMayNotTouchIt) {
  int* memory = device_memory<int>(10);
  cudaMemset(memory, 0, 40);
  cudaDeviceSynchronize();
  EXPECT_DEATH(std::printf("%d", *memory), "the host's code touches 0 bytes into the 40 bytes of device memory");
  EXPECT_DEATH(memory[3] = 1, "the host's code touches 12 bytes into the 40 bytes of device memory");
  // Another thread neither.
  EXPECT_DEATH(std::thread([&] { memory[3] = 1; }).join(), "the host's code touches");
  cudaFree(memory);
}

// Of much memory a part is closed at a time: who touches it again and again is found.
TEST(SoftgpuMemoryDeathTest, TheHostsCodeMayNotTouchMuchOfItForLong) {
  constexpr size_t kBytes = size_t{64} << 20;
  char* memory = device_memory<char>(kBytes);
  const auto touches = [&](size_t at) {
    for (int i = 0; i < 20; ++i) {
      cudaMemset(memory, i, 16);
      cudaDeviceSynchronize();
      static_cast<volatile char*>(memory)[at] = 1;
    }
  };
  EXPECT_DEATH(touches(5), "the host's code touches 5 bytes into");
  EXPECT_DEATH(touches(kBytes / 2 + 5), "the host's code touches 33554437 bytes into");
  cudaFree(memory);
}

TEST(SoftgpuMemoryDeathTest, KernelsMayNotReachBeyondIt) {
  char* memory = device_memory<char>(4096);
  const auto touches = [&](long at) {
    run_on_device([=] { memory[at] = 1; });
    cudaDeviceSynchronize();
  };
  EXPECT_DEATH(touches(4096), "beyond the 4096 bytes|use-after-poison|SEGV");
  EXPECT_DEATH(touches(-1), "before the 4096 bytes|use-after-poison|SEGV");
  touches(4095);
  cudaFree(memory);
}

#ifndef SOFTGPU_ASAN  // which finds it at once
TEST(SoftgpuMemoryDeathTest, WhatIsWrittenBetweenItAndThePagesEndIsFoundWhenItIsFreed) {
  char* memory = device_memory<char>(100);
  EXPECT_DEATH(
      {
        run_on_device([=] { memory[120] = 1; });
        cudaFree(memory);
      },
      "something wrote 21 bytes beyond the 100 bytes of device memory");
  cudaFree(memory);
}
#endif

TEST(SoftgpuMemoryDeathTest, FreedMemoryIsNobodys) {
  int* memory = device_memory<int>(10);
  cudaFree(memory);
  int* other = device_memory<int>(10);
  EXPECT_NE(memory, other);
  const auto writes = [&] {
    run_on_device([=] { memory[0] = 1; });
    cudaDeviceSynchronize();
  };
  EXPECT_DEATH(writes(), "0 bytes into the 40 bytes of freed device memory|use-after-poison");
  int* locked = locked_memory<int>(10);
  locked[3] = 1;
  cudaFreeHost(locked);
  EXPECT_DEATH(locked[3] = 2, "12 bytes into the 40 bytes of freed page-locked memory|use-after-poison");
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(other + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(other), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(other), cudaSuccess);
}

// A queued operation may still use what is freed: freeing waits for it.
TEST(SoftgpuMemory, FreeingWaitsForTheDevice) {
  int* memory = device_memory<int>(1000);
  int* result = device_memory<int>(1);
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaMemsetAsync(memory, 1, 4000, stream);
  run_on_device([=] { *result = memory[999]; }, stream);
  cudaFree(memory);
  EXPECT_EQ(values_of(result, 1)[0], 0x01010101);
  cudaFree(result);
  cudaStreamDestroy(stream);
}

TEST(SoftgpuMemory, CopiesStayWithinOneAllocation) {
  int* memory = device_memory<int>(10);
  std::vector<int> host(20);
  EXPECT_EQ(cudaMemcpy(host.data(), memory, 44, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory + 1, host.data(), 40, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(memory + 1, 0, 40), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host.data(), 0, 40), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory, host.data(), 40, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaMemcpy(host.data(), memory, 40, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaMemcpy(host.data(), memory, 40, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_TRUE(device_may_touch(memory, 40));
  EXPECT_FALSE(device_may_touch(memory, 41));
  EXPECT_FALSE(device_may_touch(host.data(), 4));
  cudaFree(memory);
}

// A GPU's memory by size; what is not touched takes none of the machine's.
TEST(SoftgpuMemory, IsAsMuchAsAnH200Has) {
  if (kThreadSanitizer) GTEST_SKIP() << "the thread sanitizer has shadows of less";
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total >> 30, 140u);
  void *most = nullptr, *more = nullptr;
  ASSERT_EQ(cudaMalloc(&most, free - (64 << 20)), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&more, size_t{65} << 20), cudaErrorMemoryAllocation);
  EXPECT_EQ(more, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  cudaFree(most);
  size_t free_again = 0;
  cudaMemGetInfo(&free_again, &total);
  EXPECT_EQ(free_again, free);
}

}  // namespace
}  // namespace softgpu
