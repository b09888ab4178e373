#pragma once

#include <cstdint>

#include "comm/communicator.h"

namespace sb {

int64_t comm_type_bytes(CommType type);

// into[i] = into[i] op other[i]. Callers bring the ranks' data in rank order, so that every implementation gives the
// same bits.
void combine(void* into, const void* other, int64_t count, CommType type, ReduceOp op);

}  // namespace sb
