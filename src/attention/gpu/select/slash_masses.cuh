#pragma once

// What the last queries of a sequence attend to, chunk by chunk of 64 keys. CUDA files only.

#include <cuda_runtime.h>

#include "attention/gpu/select/vertical_slash.h"

namespace sb::gpu {

// Of a chunk: [row][largest score, sum], then the mass of each key, then the mass by query block (the last, the one
// before it).
struct ChunkValues {
  float* rows;
  float* keys;
  float* blocks;
  __device__ ChunkValues(const SlashParams& args, const SlashSequence& sequence, int head, int chunk)
      : rows(args.chunk_values +
             (sequence.first_chunk + static_cast<int64_t>(head) * sequence.chunks + chunk) * kSlashChunkFloats),
        keys(rows + 2 * kSlashChunk),
        blocks(keys + kSlashChunk) {}
};

// Fills the values of all chunks.
void slash_masses(const SlashParams& params, Precision precision, cudaStream_t stream);

}  // namespace sb::gpu
