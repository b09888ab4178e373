// How kernels run: what a GPU promises holds, and what it does not promise is not given.
#include "softgpu/cuda/device.h"  // first, as before every .cu file
// clang-format off
#include <gtest/gtest.h>
// clang-format on

#include <cstring>
#include <numeric>
#include <vector>

#include "attention/gpu/hopper/ptx.cuh"
#include "attention/gpu/launch/early_ptx.cuh"
#include "attention/gpu/portable/ptx.cuh"
#include "device/kernel.cuh"
#include "softgpu/interface/device.h"
#include "softgpu/interface/options.h"
#include "softgpu/interface/sanitizers.h"

namespace softgpu {
namespace {

using namespace sb;
using namespace sb::gpu;

// An array on the device.
class Numbers {
 public:
  explicit Numbers(const std::vector<int>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(int)), cudaSuccess);
    cudaMemcpy(data_, values.data(), count_ * sizeof(int), cudaMemcpyHostToDevice);
  }
  ~Numbers() { cudaFree(data_); }
  int* get() const { return data_; }
  std::vector<int> host() const {
    std::vector<int> out(count_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, count_ * sizeof(int), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  int* data_ = nullptr;
  size_t count_;
};

std::vector<int> counted(int count) {
  std::vector<int> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), 1);
  return out;
}

// Runs a kernel of one block on one array.
template <typename... More>
std::vector<int> run(void (*kernel)(int*, More...), int threads, std::vector<int> values, More... more) {
  const Numbers numbers(values);
  launch_kernel(kernel, {1, threads, 0, nullptr}, numbers.get(), more...);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return numbers.host();
}

// What only the result shows in the plain order, and the thread sanitizer in every one.
template <typename Race>
void expect_race(const char* kernel, Race race) {
  if constexpr (kThreadSanitizer) {
    EXPECT_DEATH(race(), std::string("data race(.|\n)*") + kernel);
  } else {
    race();
  }
}

// --- barriers --------------------------------------------------------------------------------------------------------

__global__ void rotate_kernel(int* values, bool waits) {
  SB_SHARED(int, shared, [96]);
  shared[threadIdx.x] = values[threadIdx.x];
  if (waits) __syncthreads();
  values[threadIdx.x] = shared[(threadIdx.x + 1) % 96] + shared[(threadIdx.x + 95) % 96];
}

TEST(SoftgpuEngine, AMissingBarrierChangesTheResult) {
  std::vector<int> want(96);
  for (int i = 0; i < 96; ++i) want[static_cast<size_t>(i)] = (i + 1) % 96 + 1 + (i + 95) % 96 + 1;
  EXPECT_EQ(run(rotate_kernel, 96, counted(96), true), want);
  expect_race("rotate_kernel", [&] { EXPECT_NE(run(rotate_kernel, 96, counted(96), false), want); });
}

__global__ void halves_kernel(int* values, int threads) {
  if (threadIdx.x < 32)
    named_arrive(3, threads);
  else
    named_sync(3, 64);
  values[threadIdx.x] += 1;
}

TEST(SoftgpuEngine, NamedBarriersCount) {
  EXPECT_EQ(run(halves_kernel, 64, std::vector<int>(64, 1), 64), std::vector<int>(64, 2));
  EXPECT_DEATH(run(halves_kernel, 64, std::vector<int>(64, 1), 32), "barrier 3 .*64.*32|barrier 3 .*32.*64|deadlock");
  EXPECT_DEATH(run(halves_kernel, 64, std::vector<int>(64, 1), 40), "barrier 3 of 40 threads: not whole warps");
}

__global__ void mixed_barriers_kernel(int*, bool first_named) {
  if ((threadIdx.x < 32) == first_named)
    named_sync(0, 64);
  else
    __syncthreads();
}

TEST(SoftgpuEngine, BarrierZeroIsThatOfTheBlock) {
  for (const bool first_named : {true, false})
    EXPECT_DEATH(run(mixed_barriers_kernel, 64, counted(1), first_named),
                 "barrier 0 is waited at by 64 threads and by");
}

// --- warps -----------------------------------------------------------------------------------------------------------

__global__ void sum_kernel(int* values, uint32_t mask, int lanes) {
  if (static_cast<int>(threadIdx.x) >= lanes) return;
  int sum = values[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);
  values[threadIdx.x] = sum;
}

TEST(SoftgpuEngine, CollectivesCheckTheirMasks) {
  EXPECT_EQ(run(sum_kernel, 32, counted(32), ~0u, 32), std::vector<int>(32, 32 * 33 / 2));
  EXPECT_DEATH(run(sum_kernel, 32, counted(32), 0xFFFFu, 32),
               "sum_kernel.*(lanes 0000ffff, called by lane|lane .*not in the mask 0000ffff)");
  EXPECT_DEATH(run(sum_kernel, 32, counted(32), ~0u, 31), "sum_kernel.*80000000 have ended|wait for the other lanes");
}

__global__ void mixed_kernel(int* values) {
  values[threadIdx.x] = threadIdx.x < 16 ? __shfl_sync(~0u, 1, 0) : __any_sync(~0u, 1);
}

TEST(SoftgpuEngine, LanesThatMeetInDifferentOperationsAreTold) {
  EXPECT_DEATH(run(mixed_kernel, 32, counted(32)), "mixed_kernel.*lanes of a warp meet in a");
}

// --- shared memory ---------------------------------------------------------------------------------------------------

__global__ void dynamic_kernel(int* values, int offset) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  if (threadIdx.x == 0) values[0] = static_cast<int>(shared_load16(shared_address(raw) + offset).x);
}

TEST(SoftgpuEngine, SharedMemoryHasItsBoundsAndHoldsNothing) {
  const auto with = [](int bytes, int offset) {
    const Numbers numbers({0});
    launch_kernel(dynamic_kernel, {1, 1, bytes, nullptr}, numbers.get(), offset);
    cudaDeviceSynchronize();
    return numbers.host().front();
  };
  EXPECT_EQ(with(64, 48), -1);  // NaN in every type
  EXPECT_DEATH(with(64, 64), "dynamic_kernel.*16 bytes at .* not in the block's shared memory");
  EXPECT_DEATH(with(64, 8), "dynamic_kernel.*not aligned");
}

__global__ void uninitialised_kernel(int*) {
  SB_SHARED(uint64_t, barrier);
  barrier_wait(shared_address(&barrier), 0);
}

TEST(SoftgpuEngine, ABarrierMustBeInitialised) {
  EXPECT_DEATH(run(uninitialised_kernel, 32, counted(1)), "uninitialised_kernel.*is not initialised");
}

// --- fences: the thread sanitizer alone sees them
// ---------------------------------------------------------------------

__global__ void message_kernel(int* values, bool fences) {
  if (blockIdx.x == 1) {
    values[1] = 5;
    if (fences) __threadfence();
    atomicAdd(values, 1);
  } else {
    while (load_acquire(values) == 0) {
    }
    values[2] = values[1];
  }
}

TEST(SoftgpuEngine, AMissingFenceIsARace) {
  const auto message = [](bool fences) {
    const Numbers numbers({0, 0, 0});
    launch_kernel(message_kernel, {2, 1, 0, nullptr}, numbers.get(), fences);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(numbers.host()[2], 5);
  };
  message(true);
  // (The last block first: the writer has ended, and its thread is the reader's.)
  if (options().order != Order::reverse) expect_race("message_kernel", [&] { message(false); });
}

// --- the copy engine -------------------------------------------------------------------------------------------------

__global__ void copy_kernel(int* values, bool waits, uint32_t bytes) {
  SB_SHARED(uint64_t, barrier);
  SB_SHARED_ALIGNED(16, int, copied, [32]);
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&barrier), 1);
    barrier_init_fence();
    barrier_expect(shared_address(&barrier), bytes);
    bulk_load(shared_address(copied), values, 128, shared_address(&barrier));
  }
  __syncwarp();
  if (waits) barrier_wait(shared_address(&barrier), 0);
  const int next = copied[(threadIdx.x + 1) % 32];
  barrier_wait(shared_address(&barrier), 0);
  values[threadIdx.x] = next;
}

TEST(SoftgpuEngine, ACopyIsThereWhenItsBarrierSaysSo) {
  std::vector<int> want = counted(32);
  std::rotate(want.begin(), want.begin() + 1, want.end());
  EXPECT_EQ(run(copy_kernel, 32, counted(32), true, 128u), want);
  if (options().copies == When::late) {
    expect_race("copy_kernel",
                [] { EXPECT_EQ(run(copy_kernel, 32, counted(32), false, 128u), std::vector<int>(32, -1)); });
  }
  EXPECT_DEATH(run(copy_kernel, 32, counted(32), true, 144u), "deadlock.*nothing can go on");
}

__global__ void small_copy_kernel(int* values, bool waits) {
  SB_SHARED_ALIGNED(16, int, copied, [32]);
  if (threadIdx.x < 8) copy_async(copied + 4 * threadIdx.x, values + 4 * threadIdx.x, threadIdx.x != 7);
  if (waits) copies_done();
  __syncwarp();
  values[threadIdx.x] = copied[threadIdx.x];
  copies_done();
}

TEST(SoftgpuEngine, SmallCopiesAreWaitedFor) {
  std::vector<int> want = counted(32);
  std::fill(want.end() - 4, want.end(), 0);  // without a source
  EXPECT_EQ(run(small_copy_kernel, 32, counted(32), true), want);
  if (options().copies == When::late) {
    expect_race("small_copy_kernel", [&] { EXPECT_NE(run(small_copy_kernel, 32, counted(32), false), want); });
  }
}

// --- deadlocks, and blocks that wait for each other
// --------------------------------------------------------------------

__global__ void stuck_kernel(int*) {
  SB_SHARED(uint64_t, barrier);
  if (threadIdx.x == 0) barrier_init(shared_address(&barrier), 2);
  __syncthreads();
  if (threadIdx.x == 5) barrier_arrive(shared_address(&barrier));
  if (threadIdx.x < 32) barrier_wait(shared_address(&barrier), 0);
  __syncthreads();
}

TEST(SoftgpuEngine, ADeadlockNamesKernelBlockAndBarrier) {
  EXPECT_DEATH(run(stuck_kernel, 64, counted(1)),
               "deadlock.*\n.*stuck_kernel: 0 of 1 blocks.*\n.*block 0,0,0:\n"
               "(.*32 threads, the first of them 32, wait at __syncthreads, where 32 of 64 have come.*\n)?"
               ".*32 threads, the first of them 0, wait for phase 0 of the barrier at .*: 1 of 2 arrivals and 0 bytes");
}

__global__ void relay_kernel(int* values, int last) {
  // Every block waits for the one behind it.
  if (static_cast<int>(blockIdx.x) < last)
    while (load_acquire(values + blockIdx.x + 1) == 0) {
    }
  atomicAdd(values + blockIdx.x, 1);
}

TEST(SoftgpuEngine, BlocksThatWaitForEachOtherRunTogetherIfThereIsRoom) {
  const int room = device_limits().multiprocessors * device_limits().blocks_per_multiprocessor;
  const auto relay = [](int blocks) {
    const Numbers numbers(std::vector<int>(static_cast<size_t>(blocks), 0));
    launch_kernel(relay_kernel, {blocks, 32, 0, nullptr}, numbers.get(), blocks - 1);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return numbers.host();
  };
  EXPECT_EQ(relay(room), std::vector<int>(static_cast<size_t>(room), 32));
  if (options().order == Order::forward) {
    EXPECT_DEATH(relay(room + 1), "relay_kernel: 0 of .*; 1 have not started, since the GPU has room for");
  }
}

__global__ void large_relay_kernel(int* values) {
  SB_SHARED(int, mine, [11 << 10]);
  mine[threadIdx.x] = 1;
  if (blockIdx.x + 1 < gridDim.x)
    while (load_acquire(values + blockIdx.x + 1) == 0) {
    }
  atomicAdd(values + blockIdx.x, mine[threadIdx.x]);
}

TEST(SoftgpuEngine, SharedVariablesTakeRoomToo) {
  const DeviceLimits& limits = device_limits();
  const size_t each = (size_t{44} << 10) + limits.shared_of_system_per_block;
  const int room = limits.multiprocessors * static_cast<int>(limits.shared_per_multiprocessor / each);
  const auto relay = [](int blocks) {
    const Numbers numbers(std::vector<int>(static_cast<size_t>(blocks), 0));
    launch_kernel(large_relay_kernel, {blocks, 32, 0, nullptr}, numbers.get());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return numbers.host().front();
  };
  EXPECT_EQ(relay(room), 32);
  if (options().order == Order::forward) {
    EXPECT_DEATH(relay(room + 1), "large_relay_kernel: .*since the GPU has room");
  }
}

// --- launches --------------------------------------------------------------------------------------------------------

__global__ void first_kernel(int* values) {
  launch_dependents();
  values[0] = 1;
}
__global__ void second_kernel(int* values, bool waits) {
  if (waits) wait_for_dependencies();
  values[1] = values[0] + 1;
}

TEST(SoftgpuEngine, AnEarlyKernelRunsBeforeTheOneItDoesNotWaitFor) {
  const auto both = [](bool early, bool waits) {
    const Numbers numbers({5, 0});
    launch_kernel(first_kernel, {1, 1, 0, nullptr}, numbers.get());
    launch_dependent_kernel(second_kernel, {1, 1, 0, nullptr}, early, numbers.get(), waits);
    cudaDeviceSynchronize();
    return numbers.host()[1];
  };
  EXPECT_EQ(both(false, false), 2);
  EXPECT_EQ(both(true, true), 2);
  if (options().streams == When::late) {
    expect_race("_kernel", [&] { EXPECT_EQ(both(true, false), 6); });
  }
}

TEST(SoftgpuEngine, LaunchesBeyondTheGpuAreRefused) {
  const Numbers numbers({0});
  launch_kernel(dynamic_kernel, {0, 1, 0, nullptr}, numbers.get(), 0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  launch_kernel(dynamic_kernel, {1, 1025, 0, nullptr}, numbers.get(), 0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  launch_kernel(dynamic_kernel, {1, 1, 49 << 10, nullptr}, numbers.get(), 0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(SoftgpuEngine, KernelsHaveNames) {
  const char* name = nullptr;
  EXPECT_EQ(cudaFuncGetName(&name, reinterpret_cast<const void*>(&stuck_kernel)), cudaSuccess);
  EXPECT_STREQ(name, "softgpu::stuck_kernel");
}

}  // namespace
}  // namespace softgpu
