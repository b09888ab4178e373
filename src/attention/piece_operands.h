#pragma once

#include "attention/attention.h"

namespace sb {

// For a piece, all keys and values that this rank holds of its sequence up to the piece's end, one after the other:
// where they lie, or in a copy in exec.scratch. For whole sequences the operands as they are.
AttentionOperands keys_in_order(const Exec& exec, const PackedSequences& sequences, const AttentionOperands& operands);
// For a piece, its own keys and values alone.
AttentionOperands own_keys(const PackedSequences& sequences, const AttentionOperands& operands);

}  // namespace sb
