#pragma once

#include <memory>

#include "attention/cpu/sparse_attention.h"
#include "device/exec.h"

namespace sb {

// The attention of a model on one device: a SelectingAttention, but for the pattern `dense` on a CPU. deterministic:
// the same bits in every run (on CUDA; on a CPU it always has them). The score's channels are settled already.
std::unique_ptr<Attention> make_attention(SparseAttention::Options options, DeviceKind device,
                                          bool deterministic = false);

}  // namespace sb
