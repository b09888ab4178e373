#pragma once

#include "core/words.h"

namespace sb {

// How a step's sequences are put into micro-batches. compared: by BatchingOptions::compared, for `simulate` alone.
enum class BatchingPolicy { in_order, sab, compared };
inline constexpr Word<BatchingPolicy> kBatchingWords[] = {{"in_order", BatchingPolicy::in_order},
                                                          {"sab", BatchingPolicy::sab}};

}  // namespace sb
