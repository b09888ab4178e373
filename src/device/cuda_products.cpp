#include "device/cuda_products.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <vector>

#include "device/cuda.h"
#include "device/cuda_check.h"

namespace sb {
namespace {

#define SB_CUBLAS_CHECK(call)                                                                          \
  do {                                                                                                 \
    const cublasStatus_t sb_status = (call);                                                           \
    SB_CHECK(sb_status == CUBLAS_STATUS_SUCCESS, "{}: {}", #call, cublasLtGetStatusString(sb_status)); \
  } while (false)

constexpr size_t kMostPlans = 8192;
constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS recommends for Hopper
constexpr int kCandidates = 8;
constexpr int64_t kManyTokens = 16384, kManyTerms = 8192;
constexpr int64_t kMultiprocessors = 132;                       // of an H200
constexpr int64_t kManyOutputs = kMultiprocessors * 128 * 160;  // a tile for each of them

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      throw InternalError("no matrix products of {}", dtype_name(dtype));
  }
}

// The largest power of two up to 16 that divides the address: more is never needed, and where in an arena a tensor lies
// must not change the algorithm.
uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 16;
  return static_cast<uint32_t>(address & (~address + 1));
}

// What an algorithm depends on.
struct Kind {
  int64_t m, n, k;
  bool transpose_a, transpose_b, fp8, bias, add;
  DType input, output;
  std::array<uint32_t, 4> alignments;
  std::array<int64_t, 3> distances;
  auto operator<=>(const Kind&) const = default;
};

Kind kind_of(const CudaProduct& p) {
  const void* c = p.c != nullptr ? p.c : p.d;
  return {p.m,
          p.n,
          p.k,
          p.transpose_a,
          p.transpose_b,
          p.fp8,
          p.bias != nullptr,
          p.c != nullptr,
          p.input,
          p.output,
          {alignment(p.a), alignment(p.b), alignment(c), alignment(p.d)},
          {p.lda, p.ldb, p.ldd}};
}

// cuBLAS counts columns first: a row-major matrix is its transpose there, and Dᵀ = op(B)ᵀ · op(A)ᵀ. So "A" there is our
// B.
struct Plan {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;
  cublasLtMatmulAlgo_t algorithm;
};

void init_layout(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int64_t stored_rows, int64_t stored_columns,
                 int64_t distance) {
  SB_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&layout, type, static_cast<uint64_t>(stored_columns),
                                           static_cast<uint64_t>(stored_rows),
                                           distance == 0 ? stored_columns : distance));
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  SB_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
}

template <typename T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  SB_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

void describe(const CudaProduct& p, Plan& plan) {
  SB_CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(&plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(&plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.bias != nullptr) set(&plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  const cudaDataType_t input = p.fp8 ? CUDA_R_8F_E4M3 : data_type(p.input);
  if (p.fp8) {
    // Otherwise the tensor cores' own sums, of about 14 bits, are all there is.
    set(&plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
    // Proposals are for products with scales; the addresses are those of each call.
    set(&plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
    set(&plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
  }
  init_layout(plan.a, input, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb);
  init_layout(plan.b, input, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda);
  init_layout(plan.d, data_type(p.output), p.m, p.n, p.ldd);
}

uint32_t option_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  uint32_t value = 0;
  size_t written = 0;
  SB_CUBLAS_CHECK(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written));
  return value;
}

// Whether tiles of 256 x 128 (256 of our columns) cover the product without much beyond its edge, and fill the last
// round of multiprocessors.
bool fits_large_tiles(const CudaProduct& p) {
  constexpr int64_t kColumns = 256, kRows = 128;
  const int64_t tiles = (p.n + kColumns - 1) / kColumns * ((p.m + kRows - 1) / kRows);
  const int64_t places = (tiles + kMultiprocessors - 1) / kMultiprocessors * kMultiprocessors;
  return 100 * p.m * p.n >= 97 * tiles * kColumns * kRows && 100 * tiles >= 85 * places;
}

// Which of the library's proposals is taken. Over many tokens a GPU runs at its power limit, for which the library does
// not choose. Measured there, every proposal for as long as the limit takes to act, then in whole steps by turns
// (docs/results/engine-cuda.md): sums of many terms are shortest with tiles of 256 x 128, others with the smaller ones,
// of up to 176 x 128, that have the custom options 0 to 3. First proposals are mostly still larger.
const cublasLtMatmulAlgo_t& taken(const CudaProduct& p, const std::vector<cublasLtMatmulAlgo_t>& proposals) {
  constexpr uint32_t kHopper = 66, kMostOption = 3;  // what the library calls them
  const int64_t tokens = p.transpose_a ? p.k : p.m;
  if (p.fp8 || tokens < kManyTokens || p.m * p.n < kManyOutputs) return proposals.front();
  const auto first = [&](const auto& wanted) {
    return std::find_if(proposals.begin(), proposals.end(), [&](const cublasLtMatmulAlgo_t& proposal) {
      return option_of(proposal, CUBLASLT_ALGO_CONFIG_ID) == kHopper &&
             option_of(proposal, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 && wanted(proposal);
    });
  };
  auto found = proposals.end();
  if (p.k >= kManyTerms && fits_large_tiles(p))
    found = first([](const cublasLtMatmulAlgo_t& proposal) {
      return option_of(proposal, CUBLASLT_ALGO_CONFIG_TILE_ID) == CUBLASLT_MATMUL_TILE_256x128;
    });
  if (found == proposals.end())
    found = first([](const cublasLtMatmulAlgo_t& proposal) {
      return option_of(proposal, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION) <= kMostOption;
    });
  return found == proposals.end() ? proposals.front() : *found;
}

}  // namespace

struct CudaProducts::Implementation {
  cublasLtHandle_t handle = nullptr;
  std::shared_ptr<void> workspace = cuda::allocate("matrix products", kWorkspaceBytes);
  std::map<Kind, Plan> plans;
  bool measure = false;

  Implementation() { SB_CUBLAS_CHECK(cublasLtCreate(&handle)); }
  ~Implementation() { cublasLtDestroy(handle); }

  cublasStatus_t launch(void* stream, const CudaProduct& p, Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                        const void* c, void* d) {
    if (p.bias != nullptr) set(&plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.fp8) {
      set(&plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
      set(&plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
    }
    const float beta = p.c != nullptr ? 1.0f : 0.0f;
    return cublasLtMatmul(handle, &plan.operation, &p.scale, p.b, &plan.a, p.a, &plan.b, &beta, c, &plan.d, d, &plan.d,
                          &algorithm, workspace.get(), kWorkspaceBytes, static_cast<cudaStream_t>(stream));
  }

  std::vector<cublasLtMatmulAlgo_t> candidates(const CudaProduct& p, const Kind& kind, Plan& plan) {
    cublasLtMatmulPreferenceOpaque_t preference;
    SB_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    set(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
    // Partial sums in fp32 in the workspace; the in-place scheme adds in whatever order blocks finish.
    set(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kind.alignments[1]);
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kind.alignments[0]);
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kind.alignments[2]);
    set(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kind.alignments[3]);
    std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results;
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, &plan.operation, &plan.a, &plan.b, &plan.d, &plan.d, &preference, kCandidates, results.data(), &found);
    SB_CHECK(status == CUBLAS_STATUS_SUCCESS && found > 0, "cuBLASLt has no algorithm for {}x{}x{} in {} to {}: {}",
             p.m, p.n, p.k, p.fp8 ? "e4m3" : dtype_name(p.input), dtype_name(p.output),
             cublasLtGetStatusString(status));
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    for (int i = 0; i < found; ++i) {
      if (results[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
        algorithms.push_back(results[static_cast<size_t>(i)].algo);
    }
    SB_CHECK(!algorithms.empty(), "cuBLASLt has no working algorithm for {}x{}x{}", p.m, p.n, p.k);
    return algorithms;
  }

  // Times the candidates on the operands at hand. What must not change is written elsewhere.
  cublasLtMatmulAlgo_t fastest(void* stream, const CudaProduct& p, Plan& plan,
                               const std::vector<cublasLtMatmulAlgo_t>& algorithms) {
    const bool adds_in_place = p.c == p.d;
    std::shared_ptr<void> elsewhere;
    if (adds_in_place)
      elsewhere = cuda::allocate("measuring products", p.m * (p.ldd == 0 ? p.n : p.ldd) * dtype_bytes(p.output));
    void* d = adds_in_place ? elsewhere.get() : p.d;
    const void* c = p.c != nullptr && !adds_in_place ? p.c : d;
    const std::shared_ptr<void> begin = cuda::make_event(), end = cuda::make_event();
    const cublasLtMatmulAlgo_t* best = &algorithms.front();
    double best_time = std::numeric_limits<double>::infinity();
    for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
      double time = std::numeric_limits<double>::infinity();
      for (int run = 0; run < 4; ++run) {
        cuda::record(begin.get(), stream);
        if (launch(stream, p, plan, algorithm, c, d) != CUBLAS_STATUS_SUCCESS) break;
        cuda::record(end.get(), stream);
        cuda::wait(end.get());
        if (run > 0) time = std::min(time, cuda::milliseconds_between(begin.get(), end.get()));
      }
      if (time < best_time) {
        best_time = time;
        best = &algorithm;
      }
    }
    return *best;
  }

  Plan& plan_for(void* stream, const CudaProduct& p) {
    const Kind kind = kind_of(p);
    if (const auto found = plans.find(kind); found != plans.end()) return found->second;
    Plan plan;
    describe(p, plan);
    const std::vector<cublasLtMatmulAlgo_t> algorithms = candidates(p, kind, plan);
    plan.algorithm = measure ? fastest(stream, p, plan, algorithms) : taken(p, algorithms);
    // Micro-batches of ever-changing lengths bring new kinds without end. The proposals for a kind are always the same,
    // so they may be asked for again.
    if (!measure && plans.size() >= kMostPlans) plans.clear();
    return plans.emplace(kind, plan).first->second;
  }
};

CudaProducts::CudaProducts() : implementation_(std::make_unique<Implementation>()) {}
CudaProducts::~CudaProducts() = default;

void CudaProducts::measure_algorithms(bool measure) {
  implementation_->measure = measure;
}

void CudaProducts::run(void* stream, const CudaProduct& p) {
  SB_CHECK(p.m > 0 && p.n > 0 && p.k > 0, "a product of {}x{}x{}", p.m, p.n, p.k);
  Plan& plan = implementation_->plan_for(stream, p);
  SB_CUBLAS_CHECK(implementation_->launch(stream, p, plan, plan.algorithm, p.c != nullptr ? p.c : p.d, p.d));
}

}  // namespace sb
