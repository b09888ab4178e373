#pragma once

// What lies in a CUtensorMap here: written by the driver's cuTensorMapEncodeTiled (runtime/), read by the copy engine.

#include <cuda.h>

#include <cstdint>

namespace softgpu {

struct TensorMap {
  static constexpr uint32_t kMagic = 0x70616D54;

  uint32_t magic;
  uint32_t rank;           // 3: what the project uses; others are refused when encoded
  uint32_t type_bytes;     // of an element
  uint32_t is_float;       // fp32: what tensor_add adds
  uint32_t swizzle_bytes;  // 0 or 128
  uint32_t box[3];         // elements, innermost first
  uint64_t sizes[3];
  uint64_t strides[2];  // bytes, of the second and third dimension
  unsigned char* base;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

}  // namespace softgpu
