#pragma once

// What a kernel's thread asks of the engine. Behind every function here stands one or a few instructions of a GPU.

#include <cuda.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

// As in CUDA C++; the engine sets them whenever another thread goes on.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace softgpu {

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// --- threads ---------------------------------------------------------------------------------------------------------
int lane();
// A thread that reads memory again and again until another block writes it goes on when all others have had a turn.
void spin();
// For the thread sanitizer: a fence of memory, and an atomic operation.
void fence();
void note_atomic(const void* at);
// Programmatic dependent launch.
void wait_for_previous_kernel();
void launch_next_kernel();

// --- shared memory ---------------------------------------------------------------------------------------------------
// The block's own room for a variable of a kernel; the same for every thread of the block, filled with NaN at its
// start.
struct SharedVariable {
  size_t bytes, alignment;
  uint64_t launch = 0;  // for which `offset` holds
  size_t offset = 0;
};
unsigned char* shared_room(SharedVariable& variable);
unsigned char* dynamic_shared_room(size_t alignment);
template <typename Variable>
Variable& shared() {
  static SharedVariable variable{sizeof(Variable), alignof(Variable)};
  return *reinterpret_cast<Variable*>(shared_room(variable));
}
template <typename T>
T* dynamic_shared(size_t alignment = alignof(T)) {
  return reinterpret_cast<T*>(dynamic_shared_room(alignment));
}
// The 32-bit address of a byte of shared memory, and back; anything else ends the program.
uint32_t window(const void* in_shared_memory);
void* from_window(uint32_t address, size_t bytes);

// --- barriers of a block ---------------------------------------------------------------------------------------------
void sync_block();
void named_sync(int id, int threads);
void named_arrive(int id, int threads);

// --- what lanes of a warp do together --------------------------------------------------------------------------------
enum class Together { sync, shuffle, ballot, add, most, least, match, load_matrix, store_matrix, multiply };
// What each lane of the mask gave, in the room of 32 bytes of that lane. To be read before the next call.
using Given = const unsigned char (*)[32];
Given collect(uint32_t mask, const void* value, size_t bytes, Together what);

// --- barriers in shared memory (mbarrier) ----------------------------------------------------------------------------
void mbarrier_init(uint32_t at, uint32_t arrivals);
void mbarrier_arrive(uint32_t at, uint32_t expected_bytes);
void mbarrier_wait(uint32_t at, uint32_t parity);

// --- copies that run by themselves -----------------------------------------------------------------------------------
void tensor_load(uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t barrier);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void tensor_add(const CUtensorMap* map, int x, int y, int z, uint32_t from);
void bulk_add(float* to, uint32_t from, uint32_t bytes);
void bulk_commit();
void bulk_wait_read(int groups_left);
void bulk_wait();
void copy_async(void* to, const void* from, bool exists);  // 16 bytes; zeros where there is no source
void copies_wait();

// --- matrices --------------------------------------------------------------------------------------------------------
// One instruction of a warpgroup: this lane's part of d[64 × columns] (+)= A[64 × 16]·B[16 × columns].
struct Product {
  void* d;                // this lane's sums
  const uint32_t* lanes;  // A in registers, or null
  uint64_t a, b;          // descriptors of operands in shared memory
  int columns;
  bool transposed_a, transposed_b, accumulate;
  bool half;            // of 16-bit floats with sums of 16 bits; else bf16 with sums of fp32
  bool unused = false;  // its result: it may read what is being written
};
void product(const Product& product);
void results_unused(bool from_here);
void product_commit();
void product_wait(int groups_left);
void multiply_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);  // c[16 × 8] += a·b
void load_matrices(uint32_t (&to)[4], uint32_t address, bool transposed);
void store_matrices(uint32_t address, const uint32_t (&from)[4]);

}  // namespace softgpu
