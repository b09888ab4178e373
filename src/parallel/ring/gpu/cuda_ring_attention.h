#pragma once

#include <memory>

#include "parallel/ring/ring_attention.h"

namespace sb {

// RingAttention on GPUs: keys and values travel in the activations' type and partial results are merged in fp32;
// gradients of keys and values travel home in fp32. Each pass brings the queries and keys it needs together and runs
// the attention kernels of one GPU on them. Pairs are selected on the host, from copies of queries and keys, or (with
// Options::lists_on_device, which `vertical_slash` and `mass` with look-ahead do not take) on the device.
//
// `host` carries what ranks tell each other about their lists, `data` what lies on devices; both have the ranks that
// share sequences, carry nothing else and must outlive it. Collective: `data` is connected.
std::unique_ptr<SelectingAttention> make_cuda_ring_attention(Communicator& host, Communicator& data,
                                                             const RingAttention::Options& options);

// The index that a state of such an attention holds: of the whole sequences, with the rows of this rank's query blocks
// alone. Waits for the device.
BlockIndex read_ring_index(const AttentionState& state, ThreadPool& pool);
// Puts one in, for a forward with `replay`; on all ranks alike.
void write_ring_index(BlockIndex index, AttentionState& state);

}  // namespace sb
