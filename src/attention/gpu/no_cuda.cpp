#include "attention/gpu/cuda_attention.h"

// Attention on CUDA in a build without CUDA.

namespace sb {
namespace {

[[noreturn]] void refuse() {
  throw UserError(
      "device: cuda asked for, but this program was built without CUDA; use device: cpu or build with the cuda preset");
}

}  // namespace

std::unique_ptr<SelectingAttention> make_cuda_attention(const CudaAttentionOptions&) {
  refuse();
}
BlockIndex read_block_index(const AttentionState&, ThreadPool&) {
  refuse();
}
void write_block_index(const BlockIndex&, SelectingAttention&, const Exec&, const AttentionShape&, DType,
                       AttentionState&, std::optional<int32_t>) {
  refuse();
}
std::unique_ptr<AttentionState> make_cuda_state(void*, int64_t, const GivenSelection*) {
  refuse();
}
const char* cuda_attention_kernels(const CudaAttentionOptions&, const AttentionShape&, DType) {
  refuse();
}

}  // namespace sb
