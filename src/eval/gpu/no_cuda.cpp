#include "core/errors.h"
#include "eval/gpu/decode.h"

namespace sb::cuda {

int64_t decode_scratch_bytes(const AttentionShape&, int64_t) {
  throw InternalError("decoding on a GPU in a build without CUDA");
}
void decode_attention(const Exec&, const DecodeParams&) {
  throw InternalError("decoding on a GPU in a build without CUDA");
}
std::vector<float> block_statistics(const Exec&, const AttentionShape&, const BlockScoring&, TensorView,
                                    const LayerPlanes*) {
  throw InternalError("statistics on a GPU in a build without CUDA");
}
int64_t block_statistics_scratch_bytes(const AttentionShape&, const BlockScoring&, int64_t) {
  throw InternalError("statistics on a GPU in a build without CUDA");
}

}  // namespace sb::cuda
