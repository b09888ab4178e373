// cuBLASLt of the software device against plain sums, and what it refuses.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "softgpu/interface/options.h"

namespace softgpu {
namespace {

float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Device memory with values that all types hold exactly.
class DeviceValues {
 public:
  DeviceValues(cudaDataType_t type, const std::vector<float>& values) : type_(type), count_(values.size()) {
    std::vector<char> bytes(count_ * size());
    for (size_t i = 0; i < count_; ++i) put(bytes.data() + i * size(), values[i]);
    EXPECT_EQ(cudaMalloc(&data_, bytes.size()), cudaSuccess);
    cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  }
  ~DeviceValues() { cudaFree(data_); }
  DeviceValues(const DeviceValues&) = delete;
  DeviceValues& operator=(const DeviceValues&) = delete;
  char* at(size_t element) const { return static_cast<char*>(data_) + element * size(); }
  size_t size() const { return type_ == CUDA_R_32F ? 4 : type_ == CUDA_R_16BF ? 2 : 1; }
  std::vector<float> host() const {
    std::vector<char> bytes(count_ * size());
    cudaMemcpy(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost);
    std::vector<float> values(count_);
    for (size_t i = 0; i < count_; ++i) {
      if (type_ == CUDA_R_32F) {
        std::memcpy(&values[i], bytes.data() + 4 * i, 4);
      } else {
        uint16_t bits;
        std::memcpy(&bits, bytes.data() + 2 * i, 2);
        values[i] = from_bf16(bits);
      }
    }
    return values;
  }

 private:
  void put(char* to, float value) const {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    // e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa; normal numbers alone are used here.
    const uint32_t code = value == 0 ? 0 : (bits >> 24 & 0x80) | ((bits >> 23 & 0xFF) - 120) << 3 | (bits >> 20 & 7);
    const uint32_t element = type_ == CUDA_R_32F ? bits : type_ == CUDA_R_16BF ? bits >> 16 : code;
    std::memcpy(to, &element, size());
  }
  cudaDataType_t type_;
  size_t count_;
  void* data_ = nullptr;
};

// Multiples of 1/8 up to 1.
std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 17) - 8) / 8;
  return values;
}

struct Case {
  int m, n, k;
  bool ta = false, tb = false;
  cudaDataType_t input = CUDA_R_16BF, output = CUDA_R_32F;
  int gap = 0;  // between columns, beyond the rows
  bool bias = false;
  float alpha = 1, beta = 0;
  size_t offset = 0;  // of A, in elements
  uint32_t alignment = 4;
  size_t workspace = 1 << 20;
  int proposal = 0;
};

struct ProductCase {
  explicit ProductCase(const Case& c) : given(c) {
    const int a_rows = c.ta ? c.k : c.m, a_columns = c.ta ? c.m : c.k;
    const int b_rows = c.tb ? c.n : c.k, b_columns = c.tb ? c.k : c.n;
    cublasLtCreate(&handle);
    cublasLtMatmulDescInit(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    set(CUBLASLT_MATMUL_DESC_TRANSA, c.ta ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, c.tb ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (c.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    a_ld = a_rows + c.gap, b_ld = b_rows + c.gap, d_ld = c.m + c.gap;
    cublasLtMatrixLayoutInit(&a_layout, c.input, static_cast<uint64_t>(a_rows), static_cast<uint64_t>(a_columns), a_ld);
    cublasLtMatrixLayoutInit(&b_layout, c.input, static_cast<uint64_t>(b_rows), static_cast<uint64_t>(b_columns), b_ld);
    cublasLtMatrixLayoutInit(&d_layout, c.output, static_cast<uint64_t>(c.m), static_cast<uint64_t>(c.n), d_ld);
    a_values = random_values(c.offset + static_cast<size_t>(a_ld * a_columns), 1);
    b_values = random_values(static_cast<size_t>(b_ld * b_columns), 2);
    d_values = random_values(static_cast<size_t>(d_ld * c.n), 3);
    bias_values = random_values(static_cast<size_t>(c.m), 4);
    cudaMalloc(&workspace, 1 << 20);
  }
  ~ProductCase() {
    cudaFree(workspace);
    cublasLtDestroy(handle);
  }
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    ASSERT_EQ(cublasLtMatmulDescSetAttribute(&description, attribute, &value, sizeof value), CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t propose(std::vector<cublasLtMatmulHeuristicResult_t>& results) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulPreferenceInit(&preference);
    const auto prefer = [&](auto attribute, auto value) {
      ASSERT_EQ(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{given.workspace});
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(attribute, given.alignment);
    results.resize(8);
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &description, &a_layout, &b_layout, &d_layout,
                                                                 &d_layout, &preference, 8, results.data(), &found);
    results.resize(static_cast<size_t>(found));
    return status;
  }
  cublasStatus_t run(const DeviceValues& a, const DeviceValues& b, const DeviceValues& d,
                     const cublasLtMatmulAlgo_t& algorithm, size_t workspace_bytes = 1 << 20) {
    return cublasLtMatmul(handle, &description, &given.alpha, a.at(given.offset), &a_layout, b.at(0), &b_layout,
                          &given.beta, d.at(0), &d_layout, d.at(0), &d_layout, &algorithm, workspace, workspace_bytes,
                          nullptr);
  }
  float expected(int row, int column, float scale) const {
    double sum = 0;
    for (int i = 0; i < given.k; ++i) {
      const size_t a = given.offset + static_cast<size_t>(given.ta ? row * a_ld + i : i * a_ld + row);
      const auto b = static_cast<size_t>(given.tb ? i * b_ld + column : column * b_ld + i);
      sum += double{a_values[a]} * b_values[b];
    }
    sum *= double{given.alpha} * scale;
    if (given.beta != 0) sum += double{given.beta} * d_values[static_cast<size_t>(column * d_ld + row)];
    if (given.bias) sum += bias_values[static_cast<size_t>(row)];
    return static_cast<float>(sum);
  }

  Case given;
  cublasLtHandle_t handle{};
  cublasLtMatmulDescOpaque_t description;
  cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
  int a_ld = 0, b_ld = 0, d_ld = 0;
  std::vector<float> a_values, b_values, d_values, bias_values;
  void* workspace = nullptr;
};

void expect_right(const Case& c) {
  ProductCase setup(c);
  const DeviceValues a(c.input, setup.a_values), b(c.input, setup.b_values), d(c.output, setup.d_values);
  const DeviceValues bias(c.output, setup.bias_values);
  const DeviceValues a_scale(CUDA_R_32F, {0.5f}), b_scale(CUDA_R_32F, {4.0f});
  if (c.bias) setup.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias.at(0)));
  const bool fp8 = c.input == CUDA_R_8F_E4M3;
  if (fp8) {
    setup.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(a_scale.at(0)));
    setup.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(b_scale.at(0)));
  }
  std::vector<cublasLtMatmulHeuristicResult_t> proposals;
  ASSERT_EQ(setup.propose(proposals), CUBLAS_STATUS_SUCCESS);
  ASSERT_GT(proposals.size(), static_cast<size_t>(c.proposal));
  ASSERT_EQ(setup.run(a, b, d, proposals[static_cast<size_t>(c.proposal)].algo), CUBLAS_STATUS_SUCCESS);
  const std::vector<float> got = d.host();
  for (int column = 0; column < c.n; ++column)
    for (int row = 0; row < c.m + c.gap; ++row) {
      const auto at = static_cast<size_t>(column * setup.d_ld + row);
      if (row >= c.m) {
        if (at < got.size()) ASSERT_EQ(got[at], setup.d_values[at]) << "between the columns";
        continue;
      }
      const float want = setup.expected(row, column, fp8 ? 2.0f : 1.0f);
      ASSERT_NEAR(got[at], want, std::abs(want) * (c.output == CUDA_R_16BF ? 0x1p-8 : 1e-6) + 1e-6)
          << "row " << row << ", column " << column;
    }
}

TEST(SoftgpuProducts, AreThoseOfPlainSums) {
  for (const bool ta : {false, true})
    for (const bool tb : {false, true})
      for (const auto input : {CUDA_R_32F, CUDA_R_16BF})
        for (const int proposal : {0, 1, 2}) {
          expect_right({.m = 7, .n = 5, .k = 33, .ta = ta, .tb = tb, .input = input, .proposal = proposal});
          expect_right({.m = 16,
                        .n = 9,
                        .k = 8,
                        .ta = ta,
                        .tb = tb,
                        .input = input,
                        .gap = 3,
                        .bias = true,
                        .alpha = 0.5f,
                        .beta = 2.0f,
                        .proposal = proposal});
        }
  expect_right({.m = 12, .n = 5, .k = 33, .output = CUDA_R_16BF, .bias = true, .beta = 1.0f, .alignment = 2});
}

TEST(SoftgpuProducts, Fp8IsScaled) {
  for (const int proposal : {0, 1, 2})
    expect_right({.m = 16,
                  .n = 32,
                  .k = 64,
                  .ta = true,
                  .input = CUDA_R_8F_E4M3,
                  .output = CUDA_R_16BF,
                  .alignment = 16,
                  .proposal = proposal});
}

// What a product does not read may be anything.
TEST(SoftgpuProducts, WithoutBetaCIsNotRead) {
  ProductCase setup({.m = 3, .n = 3, .k = 3});
  const DeviceValues a(CUDA_R_16BF, setup.a_values), b(CUDA_R_16BF, setup.b_values);
  const DeviceValues d(CUDA_R_32F, std::vector<float>(9, NAN));
  std::vector<cublasLtMatmulHeuristicResult_t> proposals;
  ASSERT_EQ(setup.propose(proposals), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(setup.run(a, b, d, proposals[0].algo), CUBLAS_STATUS_SUCCESS);
  for (const float value : d.host()) EXPECT_FALSE(std::isnan(value));
}

TEST(SoftgpuProducts, StandInTheOrderOfTheirStream) {
  if (options().streams != When::late) GTEST_SKIP() << "the order is another one";
  ProductCase setup({.m = 3, .n = 3, .k = 3});
  const DeviceValues a(CUDA_R_16BF, setup.a_values), b(CUDA_R_16BF, setup.b_values);
  const DeviceValues d(CUDA_R_32F, std::vector<float>(9, 5.0f));
  void* locked = nullptr;
  cudaHostAlloc(&locked, 36, 0);
  cudaStream_t other;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  std::vector<cublasLtMatmulHeuristicResult_t> proposals;
  ASSERT_EQ(setup.propose(proposals), CUBLAS_STATUS_SUCCESS);
  cudaDeviceSynchronize();
  ASSERT_EQ(setup.run(a, b, d, proposals[0].algo), CUBLAS_STATUS_SUCCESS);
  cudaMemcpyAsync(locked, d.at(0), 36, cudaMemcpyDefault, other);
  cudaStreamSynchronize(other);
  EXPECT_EQ(static_cast<float*>(locked)[0], 5.0f);
  cudaFreeHost(locked);
  cudaStreamDestroy(other);
}

TEST(SoftgpuProducts, RefuseWhatTheLibraryWouldNotRun) {
  const Case good{.m = 16, .n = 16, .k = 64, .alignment = 16};
  ProductCase setup(good);
  const DeviceValues a(CUDA_R_16BF, setup.a_values), b(CUDA_R_16BF, setup.b_values);
  const DeviceValues d(CUDA_R_32F, setup.d_values), small(CUDA_R_32F, std::vector<float>(255));
  std::vector<cublasLtMatmulHeuristicResult_t> proposals, others;
  ASSERT_EQ(setup.propose(proposals), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(setup.run(a, b, d, proposals[0].algo), CUBLAS_STATUS_SUCCESS);
  // Memory that is not there.
  EXPECT_EQ(setup.run(a, b, small, proposals[0].algo), CUBLAS_STATUS_INVALID_VALUE);
  // Less alignment than was promised.
  ProductCase shifted({.m = 16, .n = 16, .k = 64, .offset = 1, .alignment = 16});
  const DeviceValues one_more(CUDA_R_16BF, shifted.a_values);
  ASSERT_EQ(shifted.propose(others), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(shifted.run(one_more, b, d, others[0].algo), CUBLAS_STATUS_INVALID_VALUE);
  // An algorithm of another product.
  ProductCase other({.m = 8, .n = 16, .k = 64, .alignment = 16});
  ASSERT_EQ(other.propose(others), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(setup.run(a, b, d, others[0].algo), CUBLAS_STATUS_INVALID_VALUE);
  // Too little workspace for it; and none where some is said to be.
  EXPECT_EQ(setup.run(a, b, d, proposals[1].algo, 100), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(setup.run(a, b, d, proposals[1].algo, 2 << 20), CUBLAS_STATUS_INVALID_VALUE);
  // Proposals keep to the workspace that there is.
  ProductCase poor({.m = 16, .n = 16, .k = 64, .alignment = 16, .workspace = 100});
  ASSERT_EQ(poor.propose(others), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(others.size(), 1u);
}

TEST(SoftgpuProducts, RefuseFp8OfOtherLayouts) {
  std::vector<cublasLtMatmulHeuristicResult_t> proposals;
  const auto proposed = [&](Case c) {
    c.input = CUDA_R_8F_E4M3;
    c.output = CUDA_R_16BF;
    return ProductCase(c).propose(proposals);
  };
  EXPECT_EQ(proposed({.m = 16, .n = 16, .k = 64, .ta = true, .alignment = 16}), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(proposed({.m = 16, .n = 16, .k = 64, .alignment = 16}), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(proposed({.m = 16, .n = 16, .k = 64, .ta = true, .tb = true, .alignment = 16}),
            CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(proposed({.m = 16, .n = 16, .k = 40, .ta = true, .alignment = 16}), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(proposed({.m = 16, .n = 16, .k = 64, .ta = true, .alignment = 8}), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(proposed({.m = 16, .n = 16, .k = 64, .ta = true, .gap = 1, .alignment = 16}), CUBLAS_STATUS_NOT_SUPPORTED);
  // The first proposal is not always one that runs.
  ProductCase setup(
      {.m = 16, .n = 16, .k = 48, .ta = true, .input = CUDA_R_8F_E4M3, .output = CUDA_R_16BF, .alignment = 16});
  const DeviceValues a(CUDA_R_8F_E4M3, setup.a_values), b(CUDA_R_8F_E4M3, setup.b_values);
  const DeviceValues d(CUDA_R_16BF, setup.d_values), scales(CUDA_R_32F, std::vector<float>(5, 1.0f));
  setup.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(scales.at(0)));
  setup.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(scales.at(4)));
  ASSERT_EQ(setup.propose(proposals), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(setup.run(a, b, d, proposals[0].algo), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(setup.run(a, b, d, proposals[1].algo), CUBLAS_STATUS_SUCCESS);
  setup.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(scales.at(1)));
  EXPECT_EQ(setup.run(a, b, d, proposals[1].algo), CUBLAS_STATUS_NOT_SUPPORTED);
}

}  // namespace
}  // namespace softgpu
