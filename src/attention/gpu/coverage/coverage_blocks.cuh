#pragma once

// CUDA files only.

#include <cuda_runtime.h>

#include "attention/gpu/coverage/coverage.h"

namespace sb::gpu {

// The sequence that a key block of all sequences lies in.
__device__ inline int sequence_of_block(const CoverageParams& args, int block) {
  int low = 0, high = args.sequence_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.sequences[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

// What thread block `number` measures: a key block of all, or of those that are here.
__device__ inline CoverageBlock measured_block(const CoverageParams& args, int number) {
  if (args.held != nullptr) return args.held[number];
  const int sequence = sequence_of_block(args, number), block = number - args.sequences[sequence].first_block;
  return {sequence, block, args.sequences[sequence].token + block * args.block};
}

// The row of q that has the i-th measured token of a sequence.
__device__ inline int64_t query_row(const CoverageParams& args, const CoverageSequence& sequence, int i) {
  const int number = sequence.first_token + i;
  return args.held != nullptr ? number : sequence.token + args.tokens[number].position - args.shape.first_query;
}

// Where the triple of a measured token, query head and key block lies: the largest score, the sum of exponentials
// relative to it, and the estimate that the selection would make.
__device__ inline float* block_triple(const CoverageParams& args, const CoverageSequence& sequence, int token, int head,
                                      int block) {
  return args.scores + 3 * (sequence.scores +
                            (static_cast<int64_t>(token) * args.shape.query_heads + head) * sequence.blocks + block);
}

// Fills the triples of `count` key blocks in bf16, with tensor cores.
void tensor_coverage_blocks(const CoverageParams& params, int count, cudaStream_t stream);
// Puts the estimates by planes in the place of those by statistics.
void plane_coverage_blocks(const CoverageParams& params, int count, Precision precision, cudaStream_t stream);

}  // namespace sb::gpu
