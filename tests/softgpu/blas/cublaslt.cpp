// What the project calls of cuBLASLt, with its checks: a product that the library would not run is refused here, too.
#include <cublasLt.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "softgpu/blas/product.h"
#include "softgpu/interface/device.h"
#include "softgpu/interface/kernel.h"
#include "softgpu/runtime/scheduler.h"

namespace softgpu {
namespace {

// --- what lies in the library's opaque structures
// ---------------------------------------------------------------------
constexpr uint32_t kDescription = 0x64657363, kLayout = 0x6C61796F, kPreference = 0x70726566, kAlgorithm = 0x616C676F;

struct Description {
  uint32_t magic = kDescription;
  int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  int32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  int32_t a_scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, b_scale_mode = a_scale_mode;
  int8_t fast_sums = 0;
  const void* bias = nullptr;
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
};
struct Layout {
  uint32_t magic = kLayout;
  Matrix matrix;
};
struct Preference {
  uint32_t magic = kPreference;
  uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C, D
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint64_t workspace = 0;
};
// What an algorithm was proposed for; it runs nothing else.
struct Algorithm {
  uint32_t magic = kAlgorithm;
  uint16_t number = 0, k_multiple = 1;
  uint8_t alignments[4] = {1, 1, 1, 1};  // logarithms
  uint32_t workspace = 0;
  uint32_t kind = 0;  // hash of sizes and types
};
static_assert(sizeof(Description) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

constexpr int kProposals = 3;
constexpr uint32_t kWorkspace = 1 << 20;  // what the second and third want
constexpr uint32_t kHopperFamily = 66;

cublasStatus_t refused(cublasStatus_t status, const char* format, ...) __attribute__((format(printf, 2, 3)));
cublasStatus_t refused(cublasStatus_t status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  say_refused("cuBLASLt: ", format, list);
  va_end(list);
  return status;
}

template <typename Inside, typename Opaque>
Inside read(const Opaque* opaque) {
  Inside inside;
  std::memcpy(static_cast<void*>(&inside), opaque, sizeof inside);
  if (inside.magic != Inside{}.magic)
    fail("cuBLASLt is given a structure that was not initialised, or another kind of it");
  return inside;
}
template <typename Inside, typename Opaque>
void write(const Inside& inside, Opaque* opaque) {
  std::memcpy(static_cast<void*>(opaque), &inside, sizeof inside);
}

template <typename T>
bool take(T& into, const void* value, size_t bytes) {
  if (bytes != sizeof into) return false;
  std::memcpy(&into, value, bytes);
  return true;
}

uint64_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return address & (~address + 1);
}

// --- the product that descriptions describe
// ---------------------------------------------------------------------------
Product product_of(cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                   cublasLtMatrixLayout_t d) {
  const auto what = read<Description>(description);
  Product p;
  p.a = read<Layout>(a).matrix;
  p.b = read<Layout>(b).matrix;
  p.d = read<Layout>(d).matrix;
  p.transpose_a = what.transpose_a == CUBLAS_OP_T;
  p.transpose_b = what.transpose_b == CUBLAS_OP_T;
  p.bias = what.epilogue == CUBLASLT_EPILOGUE_BIAS ? what.bias : nullptr;
  p.a_scale = what.a_scale;
  p.b_scale = what.b_scale;
  return p;
}

bool same_layout(const Matrix& a, const Matrix& b) {
  return a.type == b.type && a.rows == b.rows && a.columns == b.columns && a.distance == b.distance;
}

cublasStatus_t check_sizes(const Product& p) {
  const uint64_t m = p.transpose_a ? p.a.columns : p.a.rows, n = p.transpose_b ? p.b.rows : p.b.columns;
  const uint64_t k = p.transpose_b ? p.b.columns : p.b.rows;
  if (m != p.m() || n != p.n() || k != p.k())
    return refused(CUBLAS_STATUS_INVALID_VALUE, "a product of %lu x %lu and %lu x %lu into %lu x %lu", m, p.k(), k, n,
                   p.m(), p.n());
  for (const Matrix& matrix : {p.a, p.b, p.d})
    if (matrix.distance < static_cast<int64_t>(matrix.rows))
      return refused(CUBLAS_STATUS_INVALID_VALUE, "columns of %lu rows at a distance of %ld", matrix.rows,
                     matrix.distance);
  return CUBLAS_STATUS_SUCCESS;
}

// fp8: the documentation's table for cublasLtMatmul; the first matrix transposed, the second not.
cublasStatus_t check_types(const Product& p) {
  if (p.a.type != p.b.type || p.d.type == Element::e4m3) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.a.type == Element::f32 && p.d.type != Element::f32) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (p.a.type != Element::e4m3) {
    if (p.a_scale != nullptr || p.b_scale != nullptr)
      return refused(CUBLAS_STATUS_NOT_SUPPORTED, "scales of a product that is not of fp8");
    return CUBLAS_STATUS_SUCCESS;
  }
  if (device_limits().major < 9) return refused(CUBLAS_STATUS_NOT_SUPPORTED, "fp8 on a device of before 8.9");
  if (!p.transpose_a || p.transpose_b) return refused(CUBLAS_STATUS_NOT_SUPPORTED, "fp8 other than transposed and not");
  if (p.k() % 16 != 0) return refused(CUBLAS_STATUS_NOT_SUPPORTED, "fp8 with sums of %lu", p.k());
  for (const Matrix& matrix : {p.a, p.b, p.d})
    if (matrix.distance * static_cast<int64_t>(element_bytes(matrix.type)) % 16 != 0)
      return refused(CUBLAS_STATUS_NOT_SUPPORTED, "fp8 with columns at a distance of %ld elements", matrix.distance);
  return CUBLAS_STATUS_SUCCESS;
}

uint32_t kind_of(const Product& p) {
  uint64_t hash = 1469598103934665603u;
  const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  for (const Matrix& matrix : {p.a, p.b, p.d}) {
    mix(static_cast<uint64_t>(matrix.type));
    mix(matrix.rows);
    mix(matrix.columns);
    mix(static_cast<uint64_t>(matrix.distance));
  }
  mix(p.transpose_a);
  mix(p.transpose_b);
  mix(p.bias != nullptr);
  return static_cast<uint32_t>(hash >> 32 ^ hash);
}

// --- before the product is put into its stream, and when its turn has come
// -------------------------------------------- Null: all that it touches is there.
const char* outside(const Product& p) {
  if (!device_may_touch(p.a_data, p.a.bytes())) return "A";
  if (!device_may_touch(p.b_data, p.b.bytes())) return "B";
  if (p.beta != 0 && !device_may_touch(p.c_data, p.d.bytes())) return "C";
  if (!device_may_touch(p.d_data, p.d.bytes())) return "D";
  if (p.bias != nullptr && !device_may_touch(p.bias, p.m() * element_bytes(p.d.type))) return "the bias";
  for (const float* scale : {p.a_scale, p.b_scale})
    if (scale != nullptr && !device_may_touch(scale, sizeof *scale)) return "a scale";
  return nullptr;
}

cublasStatus_t check_algorithm(const Product& p, const Algorithm& algorithm, const void* workspace,
                               size_t workspace_bytes) {
  if (algorithm.kind != kind_of(p))
    return refused(CUBLAS_STATUS_INVALID_VALUE, "an algorithm that was proposed for another product");
  const void* pointers[4] = {p.a_data, p.b_data, p.c_data, p.d_data};
  for (int i = 0; i < 4; ++i)
    if (alignment_of(pointers[i]) < uint64_t{1} << algorithm.alignments[i])
      return refused(CUBLAS_STATUS_INVALID_VALUE,
                     "%c at %p, but the algorithm was asked for with %u bytes of alignment", "ABCD"[i], pointers[i],
                     1u << algorithm.alignments[i]);
  if (p.a.type == Element::e4m3) {
    for (const float* scale : {p.a_scale, p.b_scale})
      if (scale == nullptr || alignment_of(scale) < 16)
        return refused(CUBLAS_STATUS_NOT_SUPPORTED, "fp8 with a scale at %p", static_cast<const void*>(scale));
    // The library proposes what it then refuses, too: its first proposal wants longer sums.
    if (p.k() % algorithm.k_multiple != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (algorithm.workspace > workspace_bytes)
    return refused(CUBLAS_STATUS_INVALID_VALUE, "%zu bytes of workspace for an algorithm that takes %u",
                   workspace_bytes, algorithm.workspace);
  if (workspace_bytes > 0 && (alignment_of(workspace) < 16 || !device_may_touch(workspace, workspace_bytes)))
    return refused(CUBLAS_STATUS_INVALID_VALUE, "a workspace of %zu bytes at %p, which is not there", workspace_bytes,
                   workspace);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

extern "C" {

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "another status of cuBLAS";
  }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int{0});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t description, size_t bytes,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  if (bytes != sizeof *description || compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F)
    return refused(CUBLAS_STATUS_NOT_SUPPORTED, "sums of type %d, scales of type %d", compute, scale);
  write(Description{}, description);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t bytes, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t distance) {
  if (bytes != sizeof *layout) return CUBLAS_STATUS_INVALID_VALUE;
  if (type != CUDA_R_32F && type != CUDA_R_16BF && type != CUDA_R_8F_E4M3)
    return refused(CUBLAS_STATUS_NOT_SUPPORTED, "a matrix of type %d: not known here", type);
  const Element element = type == CUDA_R_32F ? Element::f32 : type == CUDA_R_16BF ? Element::bf16 : Element::e4m3;
  write(Layout{kLayout, {element, rows, columns, distance}}, layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t bytes) {
  if (bytes != sizeof *preference) return CUBLAS_STATUS_INVALID_VALUE;
  write(Preference{}, preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  auto own = read<Preference>(preference);
  const auto set = [&] {
    switch (attribute) {
      case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return take(own.workspace, value, bytes);
      case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return take(own.reductions, value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return take(own.alignments[0], value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return take(own.alignments[1], value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return take(own.alignments[2], value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return take(own.alignments[3], value, bytes);
      default:
        fail("cuBLASLt: preference %d is not known here: add it in cublaslt.cpp", attribute);
    }
  };
  if (!set()) return refused(CUBLAS_STATUS_INVALID_VALUE, "preference %d of %zu bytes", attribute, bytes);
  write(own, preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  auto own = read<Description>(description);
  const auto set = [&] {
    switch (attribute) {
      case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(own.transpose_a, value, bytes);
      case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(own.transpose_b, value, bytes);
      case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return take(own.epilogue, value, bytes);
      case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return take(own.bias, value, bytes);
      case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        return take(own.a_scale, value, bytes);
      case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        return take(own.b_scale, value, bytes);
      case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
        return take(own.a_scale_mode, value, bytes);
      case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
        return take(own.b_scale_mode, value, bytes);
      case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
        return take(own.fast_sums, value, bytes);
      default:
        fail("cuBLASLt: attribute %d is not known here: add it in cublaslt.cpp", attribute);
    }
  };
  if (!set()) return refused(CUBLAS_STATUS_INVALID_VALUE, "attribute %d of %zu bytes", attribute, bytes);
  const int32_t one_scale = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  if (own.a_scale_mode != one_scale || own.b_scale_mode != one_scale || own.fast_sums != 0 ||
      (own.epilogue != CUBLASLT_EPILOGUE_DEFAULT && own.epilogue != CUBLASLT_EPILOGUE_BIAS))
    fail("cuBLASLt: attribute %d has a value that is not known here: add it in cublaslt.cpp", attribute);
  write(own, description);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  Product p = product_of(description, a, b, d);
  const auto wanted = read<Preference>(preference);
  // The bias itself may come later; that there is one may not.
  static const char some_bias = 0;
  if (read<Description>(description).epilogue == CUBLASLT_EPILOGUE_BIAS) p.bias = &some_bias;
  if (!same_layout(read<Layout>(c).matrix, p.d)) return refused(CUBLAS_STATUS_NOT_SUPPORTED, "C laid out unlike D");
  if (const cublasStatus_t error = check_sizes(p); error != CUBLAS_STATUS_SUCCESS) return error;
  if (const cublasStatus_t error = check_types(p); error != CUBLAS_STATUS_SUCCESS) return error;
  Algorithm algorithm;
  algorithm.kind = kind_of(p);
  bool vectors = true;
  for (int i = 0; i < 4; ++i) {
    const uint32_t alignment = wanted.alignments[i];
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) return CUBLAS_STATUS_INVALID_VALUE;
    algorithm.alignments[i] = static_cast<uint8_t>(__builtin_ctz(alignment));
    if (alignment < 16) vectors = false;
  }
  if (p.a.type == Element::e4m3 && !vectors)
    return refused(CUBLAS_STATUS_NOT_SUPPORTED, "fp8 without an alignment of 16 bytes");
  for (int i = 0; i < kProposals && *found < most; ++i) {
    // Where vectors cannot be loaded, another algorithm comes first.
    algorithm.number = static_cast<uint16_t>((i + (vectors ? 0 : 1)) % kProposals);
    algorithm.workspace = algorithm.number == 0 ? 0 : kWorkspace;
    algorithm.k_multiple = algorithm.number == 0 ? 64 : 1;
    if (algorithm.workspace > wanted.workspace) continue;
    cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
    std::memset(static_cast<void*>(&result), 0, sizeof result);
    write(algorithm, &result.algo);
    result.workspaceSize = algorithm.workspace;
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1;
  }
  return *found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                    size_t bytes, size_t* written) {
  const auto own = read<Algorithm>(algorithm);
  uint32_t option = 0;
  if (attribute == CUBLASLT_ALGO_CONFIG_ID)
    option = kHopperFamily;
  else if (attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM)
    option = own.number == 2 ? 3 : 1;
  else if (attribute == CUBLASLT_ALGO_CONFIG_TILE_ID)
    option = own.number == 1 ? CUBLASLT_MATMUL_TILE_256x128 : CUBLASLT_MATMUL_TILE_128x128;
  else if (attribute == CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION)
    option = 4 - own.number;
  else
    fail("cuBLASLt: attribute %d of algorithms is not known here: add it in cublaslt.cpp", attribute);
  if (bytes != sizeof option) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, &option, bytes);
  *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  Product p = product_of(description, a_layout, b_layout, d_layout);
  const auto chosen = read<Algorithm>(algorithm);
  if (!same_layout(read<Layout>(c_layout).matrix, p.d)) return CUBLAS_STATUS_NOT_SUPPORTED;
  p.alpha = *static_cast<const float*>(alpha);
  p.beta = *static_cast<const float*>(beta);
  p.a_data = a;
  p.b_data = b;
  p.c_data = c;
  p.d_data = d;
  p.parts = chosen.number + 1;
  if (read<Description>(description).epilogue == CUBLASLT_EPILOGUE_BIAS && p.bias == nullptr)
    return refused(CUBLAS_STATUS_INVALID_VALUE, "a bias is to be added, but there is none");
  const Scheduler::Turn turn;
  if (const char* what = outside(p); what != nullptr)
    return refused(CUBLAS_STATUS_INVALID_VALUE,
                   "a product of %lu x %lu x %lu, whose %s is not within memory of the device", p.m(), p.n(), p.k(),
                   what);
  if (const cublasStatus_t error = check_algorithm(p, chosen, workspace, workspace_bytes);
      error != CUBLAS_STATUS_SUCCESS)
    return error;
  Scheduler::get().put(*Scheduler::get().of(stream), {.what = "a matrix product", .run = [p] { multiply(p); }});
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
