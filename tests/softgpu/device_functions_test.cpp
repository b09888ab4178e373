// Devices, errors and tensor maps of the software device.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "softgpu/interface/kernel.h"
#include "softgpu/interface/tensor_map.h"
#include "softgpu/runtime/errors.h"

namespace softgpu {
namespace {

Kernel small_kernel() {
  Kernel kernel;
  kernel.body = [] {};
  kernel.library_name = "a kernel of the test";
  kernel.grid = kernel.block = dim3(1);
  return kernel;
}

// Prints what the device says it is and ends, in a process of its own, whose environment is another.
void say_what_it_is() {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, 0);
  int shared = 0, devices = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  cudaGetDeviceCount(&devices);
  std::fprintf(stderr, "%s, %d.%d, %d KiB, %d devices", properties.name, properties.major, properties.minor,
               shared / 1024, devices);
  std::exit(0);
}

class SoftgpuDevice : public testing::Test {
 protected:
  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";  // which starts the program anew
    unsetenv("SOFTGPU_DEVICE");
    unsetenv("SOFTGPU_DEVICES");
  }
  void TearDown() override { SetUp(); }
};

TEST_F(SoftgpuDevice, IsWhatTheEnvironmentSays) {
  EXPECT_EXIT(say_what_it_is(), testing::ExitedWithCode(0), "like an H200, 9.0, 227 KiB, 1 devices");
  setenv("SOFTGPU_DEVICE", "a100", 1);
  setenv("SOFTGPU_DEVICES", "3", 1);
  EXPECT_EXIT(say_what_it_is(), testing::ExitedWithCode(0), "like an A100, 8.0, 163 KiB, 3 devices");
  setenv("SOFTGPU_DEVICES", "0", 1);
  EXPECT_EXIT(say_what_it_is(), testing::ExitedWithCode(2), "SOFTGPU_DEVICES=0 is no number from 1 to 16");
}

// Each thread has its own; work of one device is not put into another's streams.
TEST_F(SoftgpuDevice, StreamsBelongToADevice) {
  setenv("SOFTGPU_DEVICES", "2", 1);
  const auto program = [] {
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    bool well = false;
    std::thread([&] {
      cudaSetDevice(1);
      Kernel kernel = small_kernel();
      kernel.stream = stream;
      well = enqueue_kernel(kernel) == cudaErrorInvalidResourceHandle;
      cudaEvent_t event;
      cudaEventCreate(&event);
      well = well && cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle;
      cudaEventDestroy(event);
    }).join();
    Kernel kernel = small_kernel();
    kernel.stream = stream;
    well = well && enqueue_kernel(kernel) == cudaSuccess && cudaSetDevice(2) == cudaErrorInvalidDevice;
    std::exit(well ? 0 : 1);
  };
  EXPECT_EXIT(program(), testing::ExitedWithCode(0),
              "launch of a kernel of the test on a stream of device 0, from device 1");
}

TEST_F(SoftgpuDevice, ErrorsAreKeptUntilSomebodyAsks) {
  Kernel kernel = small_kernel();
  kernel.block = dim3(1025);
  EXPECT_EQ(enqueue_kernel(kernel), cudaErrorInvalidConfiguration);
  kernel.block = dim3(32);
  kernel.grid = dim3(0);
  EXPECT_EQ(enqueue_kernel(kernel), cudaErrorInvalidConfiguration);
  EXPECT_EQ(enqueue_kernel(small_kernel()), cudaSuccess);
  std::thread([] { EXPECT_EQ(cudaGetLastError(), cudaSuccess); }).join();
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  kernel = small_kernel();
  kernel.dynamic_shared = 48 * 1024 + 1;  // without having been allowed it
  EXPECT_EQ(enqueue_kernel(kernel), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST_F(SoftgpuDevice, ALostDeviceFailsForGood) {
  const auto program = [] {
    lose_device(cudaErrorLaunchFailure);
    void* memory = nullptr;
    const bool well = cudaMalloc(&memory, 100) == cudaErrorLaunchFailure &&
                      cudaDeviceSynchronize() == cudaErrorLaunchFailure &&
                      enqueue_kernel(small_kernel()) == cudaErrorLaunchFailure &&
                      cudaGetLastError() == cudaErrorLaunchFailure && cudaGetLastError() == cudaErrorLaunchFailure;
    std::exit(well ? 0 : 1);
  };
  EXPECT_EXIT(program(), testing::ExitedWithCode(0), "");
}

TEST_F(SoftgpuDevice, KernelsCallNoFunctionsOfTheHost) {
  const auto program = [] {
    Kernel kernel = small_kernel();
    kernel.body = [] { cudaDeviceSynchronize(); };
    enqueue_kernel(kernel);
    cudaDeviceSynchronize();
  };
  EXPECT_DEATH(program(), "a kernel calls a function of the host's runtime");
}

// --- tensor maps
// ------------------------------------------------------------------------------------------------------

struct MapCase {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  uintptr_t base = 0x10000;
  cuuint64_t sizes[3] = {64, 4, 100}, strides[2] = {128, 512};
  cuuint32_t box[3] = {64, 1, 16}, steps[3] = {1, 1, 1};
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
};

CUresult encoded(const MapCase& c, CUtensorMap* map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
            cudaSuccess);
  EXPECT_EQ(found, cudaDriverEntryPointSuccess);
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map, c.type, 3, reinterpret_cast<void*>(c.base), c.sizes, c.strides, c.box, c.steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, c.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

TEST(SoftgpuTensorMaps, AreEncoded) {
  CUtensorMap map;
  ASSERT_EQ(encoded({}, &map), CUDA_SUCCESS);
  TensorMap inside;
  std::memcpy(static_cast<void*>(&inside), &map, sizeof inside);
  EXPECT_EQ(inside.magic, TensorMap::kMagic);
  EXPECT_EQ(inside.type_bytes, 2u);
  EXPECT_EQ(inside.swizzle_bytes, 128u);
  EXPECT_EQ(inside.sizes[2], 100u);
  EXPECT_EQ(inside.strides[1], 512u);
  EXPECT_EQ(inside.box[2], 16u);
  EXPECT_EQ(inside.base, reinterpret_cast<unsigned char*>(0x10000));
}

TEST(SoftgpuTensorMaps, RefuseWhatTheDriverRefuses) {
  CUtensorMap map;
  const auto refuses = [&](MapCase c) { return encoded(c, &map) == CUDA_ERROR_INVALID_VALUE; };
  EXPECT_FALSE(refuses({}));
  EXPECT_TRUE(refuses({.base = 0x10008}));
  EXPECT_TRUE(refuses({.base = 0}));
  EXPECT_TRUE(refuses({.sizes = {64, 4, 0}}));
  EXPECT_TRUE(refuses({.strides = {136, 544}}));  // no multiple of 16
  EXPECT_TRUE(refuses({.strides = {64, 512}}));   // shorter than a row
  EXPECT_TRUE(refuses({.strides = {128, 256}}));  // shorter than what it passes
  EXPECT_TRUE(refuses({.strides = {cuuint64_t{1} << 40, cuuint64_t{1} << 42}}));
  EXPECT_TRUE(refuses({.box = {64, 1, 257}}));
  EXPECT_TRUE(refuses({.box = {64, 0, 16}}));
  EXPECT_TRUE(refuses({.box = {128, 1, 16}}));  // rows wider than the swizzle
  EXPECT_FALSE(refuses({.box = {128, 1, 16}, .swizzle = CU_TENSOR_MAP_SWIZZLE_NONE}));
  EXPECT_TRUE(refuses({.box = {4, 1, 16}}));  // rows of 8 bytes
  EXPECT_TRUE(refuses({.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32}));
  alignas(64) char room[sizeof(CUtensorMap) + 64];
  EXPECT_EQ(encoded({}, reinterpret_cast<CUtensorMap*>(room + 32)), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
}  // namespace softgpu
