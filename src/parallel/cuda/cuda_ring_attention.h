#pragma once

#include <memory>

#include "parallel/ring_attention.h"

namespace sb {

// RingAttention on GPUs: keys and values travel in the activations' type and partial results are merged in fp32;
// gradients of keys and values travel home in fp32. Each pass brings the queries and keys it needs together and runs
// the attention kernels of one GPU on them. Pairs are chosen on the host, from copies of queries and keys.
//
// `host` carries what ranks tell each other about their lists, `data` what lies on devices; both have the ranks that
// share sequences, carry nothing else and must outlive it.
std::unique_ptr<ChoosingAttention> make_cuda_ring_attention(Communicator& host, Communicator& data,
                                                            const RingAttention::Options& options);

// The index that a state of such an attention holds, as RingAttention::index().
BlockIndex& cuda_ring_index(AttentionState& state);

}  // namespace sb
