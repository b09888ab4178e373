// NCCL on streams of the software device. Two GPUs (SOFTGPU_DEVICES=2).
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "comm/device/nccl_library.h"
#include "softgpu/interface/options.h"

namespace softgpu {
namespace {

using sb::NcclLibrary;
namespace nccl = sb::nccl;

NcclLibrary& library() {
  static NcclLibrary loaded("libnccl.so.2");
  return loaded;
}

// A rank with its device, a stream and memory for two numbers.
class Rank {
 public:
  explicit Rank(int number, int device = -1) : number_(number) {
    EXPECT_EQ(cudaSetDevice(device < 0 ? number : device), cudaSuccess);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc(reinterpret_cast<void**>(&values), 2 * sizeof(float));
    const float own[2] = {1.0f + static_cast<float>(number), 10};
    cudaMemcpy(values, own, sizeof own, cudaMemcpyHostToDevice);
    cudaDeviceSynchronize();  // the stream does not wait for the one of this copy
  }
  ~Rank() {
    leave();
    cudaFree(values);
    cudaStreamDestroy(stream);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  // Without waiting for what it began.
  void leave() {
    if (comm != nullptr) library().comm_abort(comm);
    comm = nullptr;
  }
  nccl::Result join(const nccl::UniqueId& id) {
    nccl::Config config;
    config.blocking = 0;
    return library().comm_init_rank_config(&comm, 2, id, number_, &config);
  }
  nccl::Result state() {
    nccl::Result now;
    library().comm_get_async_error(comm, &now);
    return now;
  }
  nccl::Result sum() { return library().all_reduce(values, values, 1, nccl::kFloat32, nccl::kSum, comm, stream); }
  float first() {
    float value = 0;
    cudaMemcpyAsync(&value, values, 4, cudaMemcpyDeviceToHost, stream);
    return value;
  }

  nccl::Comm comm = nullptr;
  cudaStream_t stream{};
  float* values = nullptr;

 private:
  int number_;
};

class SoftgpuNccl : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    cudaGetDeviceCount(&devices);
    if (devices < 2) GTEST_SKIP() << "SOFTGPU_DEVICES=2 is not set";
    library().get_unique_id(&id_);
  }
  nccl::UniqueId id_;
};

// The call returns at once; the sum is there when both streams have come to it.
TEST_F(SoftgpuNccl, ACollectiveWaitsForTheOtherStream) {
  Rank zero(0), one(1);
  cudaSetDevice(0);
  zero.join(id_);
  cudaSetDevice(1);
  one.join(id_);
  ASSERT_EQ(one.state(), nccl::kSuccess);
  cudaMemsetAsync(one.values, 0, 4, one.stream);  // before it: 0 is added
  one.sum();
  EXPECT_EQ(one.state(), nccl::kSuccess);
  cudaEvent_t event;
  cudaEventCreate(&event);
  cudaEventRecord(event, one.stream);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  cudaSetDevice(0);
  zero.sum();
  cudaMemsetAsync(zero.values, 0, 4, zero.stream);  // after it: of no consequence to the other
  cudaSetDevice(1);
  EXPECT_EQ(one.first(), 1.0f);
  cudaSetDevice(0);
  EXPECT_EQ(zero.first(), 0.0f);
  cudaEventDestroy(event);
  cudaGetLastError();
}

TEST_F(SoftgpuNccl, RanksThatCallDifferentThingsAreTold) {
  Rank zero(0), one(1);
  cudaSetDevice(0);
  zero.join(id_);
  cudaSetDevice(1);
  one.join(id_);
  cudaSetDevice(0);
  zero.sum();
  cudaSetDevice(1);
  const nccl::Result result = library().all_gather(one.values, one.values, 1, nccl::kFloat32, one.comm, one.stream);
  EXPECT_THAT(
      library().message(result, one.comm),
      testing::HasSubstr(
          "rank 1 calls all_gather of 1 elements of type 7 as operation 0 of a communicator, rank 0 all_reduce of 1"));
  // The ranks give up; the stream goes on.
  zero.leave();
  one.leave();
  cudaSetDevice(0);
  EXPECT_EQ(zero.first(), 1.0f);
}

TEST_F(SoftgpuNccl, RanksHaveADeviceEach) {
  Rank zero(0, 0), one(1, 0);
  zero.join(id_);
  one.join(id_);
  EXPECT_THAT(library().message(one.state(), one.comm), testing::HasSubstr("duplicate GPU"));
}

using SoftgpuNcclDeathTest = SoftgpuNccl;

TEST_F(SoftgpuNcclDeathTest, MemoryIsTheDevices) {
  const auto program = [&] {
    Rank zero(0), one(1);
    cudaSetDevice(0);
    zero.join(id_);
    cudaSetDevice(1);
    one.join(id_);
    float host = 0;
    library().all_reduce(&host, one.values, 1, nccl::kFloat32, nccl::kSum, one.comm, one.stream);
  };
  EXPECT_DEATH(program(), "NCCL: all_reduce of 1 elements by rank 1, .* is not within memory of the device");
  const auto beyond = [&] {
    Rank zero(0), one(1);
    cudaSetDevice(0);
    zero.join(id_);
    cudaSetDevice(1);
    one.join(id_);
    library().all_gather(one.values, one.values, 2, nccl::kFloat32, one.comm, one.stream);
  };
  EXPECT_DEATH(beyond(), "is not within memory of the device");
}

}  // namespace
}  // namespace softgpu
