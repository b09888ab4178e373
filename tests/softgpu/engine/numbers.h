#pragma once

// 16-bit floats by their bits, and the order of pieces in swizzled shared memory.

#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

namespace softgpu {

using Eight = float __attribute__((vector_size(32)));

inline float from_bf16(uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}
inline float from_half(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Pieces of 16 bytes change places within eight rows of 128 bytes.
inline uint32_t swizzled(uint32_t address) {
  return address ^ ((address >> 7 & 7) << 4);
}

}  // namespace softgpu
