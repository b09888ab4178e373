// The ring's CUDA side of a build without CUDA: nothing gets this far, since there is no device.

#include "core/errors.h"
#include "parallel/ring/gpu/cuda_ring_attention.h"
#include "parallel/ring/ring_kernels.h"

namespace sb {
namespace {

[[noreturn]] void refuse() {
  throw UserError("a ring of GPUs asked for, but this program was built without CUDA; use device: cpu");
}

}  // namespace

namespace gpu {

void add_floats(const Exec&, const float*, float*, int64_t) {
  refuse();
}

}  // namespace gpu

std::unique_ptr<SelectingAttention> make_cuda_ring_attention(Communicator&, Communicator&,
                                                             const RingAttention::Options&) {
  refuse();
}

BlockIndex read_ring_index(const AttentionState&, ThreadPool&) {
  refuse();
}

void write_ring_index(BlockIndex, AttentionState&) {
  refuse();
}

}  // namespace sb
