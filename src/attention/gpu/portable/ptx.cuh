#pragma once

// Thin wrappers of the PTX that the portable kernels need and CUDA C++ has no name for: copies to shared memory without
// waiting, and products of 16-bit matrices. For GPUs from compute capability 8.0 on. CUDA files only.

#include <cuda_runtime.h>

#include <cstdint>

namespace sb::gpu {

__device__ __forceinline__ uint32_t window(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes to shared memory without waiting; zeros where there is no source.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(window(to)), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copies_done() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8×8 matrices of 16-bit floats; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void matrix_load(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void matrix_load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// c[16 × 8] += A·B, A [16 × 16] and B [16 × 8] as matrix_load() leaves them in the lanes.
__device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace sb::gpu
