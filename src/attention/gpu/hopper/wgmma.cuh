#pragma once

// The tensor-core instructions of SM90a: a warpgroup (128 threads) multiplies a 64-row A by an N-column B, 16 deep.
//
// The accumulator of a thread holds, for each 8 columns j, d[4j..4j+1] of row 16·warp + lane/4 and d[4j+2..4j+3] of
// the row 8 below, columns 8j + 2·(lane % 4) and the next. Two neighbouring j, rounded to bf16 pairs, are exactly the A
// operand of a 16-deep product: that is how P and dS feed the next product without leaving the registers.

#include <cstdint>

namespace sb::gpu {

// A tile in shared memory is rows of 128 bytes (64 bf16), 128-byte swizzled, in chunks of 64 columns. `address` may
// point inside a row (advance along the contiguous direction) or at a multiple of 8 rows. `chunk_bytes` is the distance
// between two chunks; it matters only for operands that are read transposed and wider than 64.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t chunk_bytes = 16) {
  uint64_t d = (address & 0x3FFFF) >> 4;
  d |= static_cast<uint64_t>((chunk_bytes & 0x3FFFF) >> 4) << 16;
  d |= static_cast<uint64_t>(1024 >> 4) << 32;  // eight rows to the next eight
  d |= static_cast<uint64_t>(1) << 62;          // 128-byte swizzle
  return d;
}

// The same tile `bytes` further on (a constant, so that one addition is all it costs).
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Products that are issued from here on may read what is being written: nobody uses what they leave. (No instruction:
// the software device of the tests reports such reads otherwise.)
__device__ __forceinline__ void results_unused(bool) {}

// Keeps the compiler from moving reads or writes of accumulators across the asynchronous product that owns them.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// A lane's 16, 32 or 64 sums of a product, as asm statements name them and as their operands.
// clang-format off
#define SB_SUM_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SB_SUM_NAMES_32 \
  SB_SUM_NAMES_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SB_SUM_NAMES_64 \
  SB_SUM_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SB_SUMS_16(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define SB_HALF_SUMS_16(d) \
  "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
  "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])
#define SB_SUMS_32(d) \
  SB_SUMS_16(d), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define SB_SUMS_64(d) \
  SB_SUMS_32(d), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// clang-format on

template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SB_SUM_NAMES_32 "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
      : SB_SUMS_32(d)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SB_SUM_NAMES_16
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}\n"
      : SB_SUMS_16(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SB_SUM_NAMES_32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
      : SB_SUMS_32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
}

// Of 16-bit floats, summed as such: two sums in a register.
__device__ __forceinline__ void wgmma_rs_half(uint32_t (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16 {" SB_SUM_NAMES_16
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
      : SB_HALF_SUMS_16(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SB_SUM_NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
      : SB_SUMS_64(d)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SB_SUM_NAMES_64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
      : SB_SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
}

#undef SB_SUM_NAMES_16
#undef SB_SUM_NAMES_32
#undef SB_SUM_NAMES_64
#undef SB_SUMS_16
#undef SB_HALF_SUMS_16
#undef SB_SUMS_32
#undef SB_SUMS_64

}  // namespace sb::gpu
