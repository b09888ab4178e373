#pragma once

#include "attention/attention.h"

namespace sb {

// Of a piece, keys and values from the first token of its sequence on (where ranks share it: all that this one holds up
// to the piece's end), one after the other: where they lie, or in a copy in exec.scratch. Of whole sequences the
// operands as they are.
AttentionOperands keys_in_order(const Exec& exec, const PackedSequences& sequences, const AttentionOperands& operands);
// Of a piece, its own keys and values alone.
AttentionOperands own_keys(const PackedSequences& sequences, const AttentionOperands& operands);

}  // namespace sb
