#pragma once

#include <memory>
#include <optional>

#include "attention/cpu/sparse_attention.h"
#include "attention/gpu/plan/given_selection.h"

namespace sb {

struct CudaAttentionOptions {
  SparseAttention::Options attention;  // with the pattern `dense`, every sequence is
  bool deterministic = false;          // the same bits in every run, somewhat slower backward
  bool portable = false;               // the portable kernels even where there are faster ones
};

// Attention on a CUDA device: bf16 with the Hopper kernels where the GPU and the shape allow it, else (and in fp32)
// with the portable ones. Operands, exec.scratch and the lists a state keeps are device memory; everything is queued on
// exec.stream and nothing waits for it. UserError for what it cannot do. Keys and values of a piece are read where they
// lie if its pages follow each other, else from a copy that puts them in order.
std::unique_ptr<SelectingAttention> make_cuda_attention(const CudaAttentionOptions& options);

// The lists that a state of such an attention holds. Waits for the device.
BlockIndex read_block_index(const AttentionState& state, ThreadPool& pool);

// Puts given lists into a state of such an attention: a forward with `replay` and its backward then use them. Queued on
// exec.stream. `first_query`: of a piece, whose sequence up to its end is the only one of the index.
void write_block_index(const BlockIndex& index, SelectingAttention& attention, const Exec& exec,
                       const AttentionShape& shape, DType dtype, AttentionState& state,
                       std::optional<int32_t> first_query = {});

// A state whose lists lie in device memory of the caller: of a forward to come, or of one that ran with the same
// attention, shape, layer and sequences, whose backward it then serves. `given`: what the forward selects by and where
// it leaves what it sees; must outlast it.
std::unique_ptr<AttentionState> make_cuda_state(void* lists, int64_t bytes, const GivenSelection* given = nullptr);

// Whether the Hopper kernels would run.
bool cuda_attention_takes_hopper(const CudaAttentionOptions& options, const AttentionShape& shape, DType dtype);
// Which kernels would run, for logs: "Hopper" or "portable".
const char* cuda_attention_kernels(const CudaAttentionOptions& options, const AttentionShape& shape, DType dtype);

}  // namespace sb
