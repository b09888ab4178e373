#include "attention/gpu/hopper/launch.cuh"

namespace sb::gpu {

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  return count;
}

namespace {

// Through the runtime, so that nothing links against the driver library.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess) throw_cuda("cuTensorMapEncodeTiled", "not in this driver");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

namespace {

// [tokens, heads, d] in boxes of 128 bytes × box_heads × box_tokens.
CUtensorMap swizzled_map(CUtensorMapDataType type, int bytes, const void* data, int64_t tokens, int heads, int d,
                         int box_heads, int box_tokens) {
  static const auto encode = encode_function();
  CUtensorMap map;
  const auto row = static_cast<cuuint64_t>(d) * bytes;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(d), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {row, row * heads};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_heads),
                             static_cast<cuuint32_t>(box_tokens)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw_cuda("tensor map", "refused (pointers must be 16-byte aligned)");
  return map;
}

}  // namespace

CUtensorMap packed_map(const void* data, int64_t tokens, int heads, int d, int box_heads, int box_tokens) {
  return swizzled_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, tokens, heads, d, box_heads, box_tokens);
}

CUtensorMap sums_map(const void* data, int64_t tokens, int heads, int d) {
  return swizzled_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, data, tokens, heads, d, 1, kSubtileRows);
}

CUtensorMap gathered_map(const void* data, const GatheredColumns& gathered, int d) {
  return packed_map(data, int64_t{gathered.piece_count} * kGatheredPiece, 1, d, 1, kBlock);
}

void check_shape(const Shape& shape, const Tiling& tiling, const GatheredColumns& gathered) {
  if (shape.head_dim != 64 && shape.head_dim != 128) throw_unsupported("head_dim", shape.head_dim);
  if (shape.kv_heads < 1 || shape.query_heads % shape.kv_heads != 0)
    throw_unsupported("query_heads", shape.query_heads);
  if (tiling.tile != 2 && (tiling.block != kBlock || gathered.piece_count > 0))
    throw_unsupported("odd tokens of a query block", tiling.query_block);
  if (tiling.heads < 1 || shape.query_heads / shape.kv_heads % tiling.heads != 0)
    throw_unsupported("heads of a tile", tiling.heads);
  if (tiling.keys != kBlock) throw_unsupported("keys of an item", tiling.keys);
  if (tiling.block != kBlock && tiling.block != kBlock / 2) throw_unsupported("blocks of tokens", tiling.block);
  if (tiling.tokens < 1 || tiling.tokens * tiling.heads > kSubtileRows)
    throw_unsupported("tokens of a subtile", tiling.tokens);
}

}  // namespace sb::gpu
