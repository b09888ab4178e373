#include "softgpu/driver/encode_tensor_map.h"

#include <cstdarg>
#include <cstring>

#include "softgpu/interface/kernel.h"
#include "softgpu/interface/tensor_map.h"

namespace softgpu {
namespace {

constexpr cuuint32_t kRank = 3;

// The rules are those of the driver's documentation of cuTensorMapEncodeTiled.
CUresult refused(const char* format, ...) __attribute__((format(printf, 1, 2)));
CUresult refused(const char* format, ...) {
  va_list list;
  va_start(list, format);
  say_refused("a tensor map ", format, list);
  va_end(list);
  return CUDA_ERROR_INVALID_VALUE;
}

bool aligned(const void* pointer, uintptr_t to) {
  return reinterpret_cast<uintptr_t>(pointer) % to == 0;
}

CUresult check_sizes(const cuuint64_t* sizes, const cuuint64_t* strides, uint32_t type_bytes) {
  constexpr cuuint64_t kMostSize = cuuint64_t{1} << 32, kMostStride = cuuint64_t{1} << 40;
  for (cuuint32_t i = 0; i < kRank; ++i)
    if (sizes[i] == 0 || sizes[i] > kMostSize) return refused("of %lu in dimension %u", sizes[i], i);
  cuuint64_t least = sizes[0] * type_bytes;
  for (cuuint32_t i = 0; i + 1 < kRank; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= kMostStride) return refused("with stride %lu", strides[i]);
    if (strides[i] < least) return refused("with stride %lu below the %lu bytes of what it passes", strides[i], least);
    least = strides[i] * sizes[i + 1];
  }
  return CUDA_SUCCESS;
}

CUresult check_box(const cuuint32_t* box, const cuuint32_t* steps, uint32_t type_bytes, bool swizzled) {
  for (cuuint32_t i = 0; i < kRank; ++i) {
    if (box[i] == 0 || box[i] > 256) return refused("with a box of %u in dimension %u", box[i], i);
    if (steps[i] != 1) return refused("with steps of %u: not known here", steps[i]);
  }
  const uint32_t row = box[0] * type_bytes;
  if (row % 16 != 0) return refused("with rows of %u bytes in the box", row);
  if (swizzled && row > 128) return refused("with rows of %u bytes in the box, swizzled by 128", row);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (!aligned(map, 64)) return refused("itself at %p, not aligned to 64 bytes", static_cast<void*>(map));
  if (rank != kRank) return refused("of rank %u: only 3 is known here", rank);
  if (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
    return refused("of type %d: not known here", type);
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return refused("interleaved, or filled with NaN: not known here");
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_128B)
    return refused("with swizzle %d: not known here", swizzle);
  if (base == nullptr || !aligned(base, 16)) return refused("of memory at %p, not aligned to 16 bytes", base);
  const bool is_float = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const uint32_t type_bytes = is_float ? 4 : 2;
  if (const CUresult error = check_sizes(sizes, strides, type_bytes); error != CUDA_SUCCESS) return error;
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (const CUresult error = check_box(box, steps, type_bytes, swizzled); error != CUDA_SUCCESS) return error;

  TensorMap made{};
  made.magic = TensorMap::kMagic;
  made.rank = rank;
  made.type_bytes = type_bytes;
  made.is_float = is_float;
  made.swizzle_bytes = swizzled ? 128 : 0;
  made.base = static_cast<unsigned char*>(base);
  for (cuuint32_t i = 0; i < kRank; ++i) {
    made.sizes[i] = sizes[i];
    made.box[i] = box[i];
    if (i + 1 < kRank) made.strides[i] = strides[i];
  }
  std::memset(static_cast<void*>(map), 0, sizeof *map);
  std::memcpy(static_cast<void*>(map), &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace softgpu
