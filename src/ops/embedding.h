#pragma once

#include "device/exec.h"

namespace sb {

// x [T, H] = table [V, H] at tokens [T] (i32). Token ids are checked against V where sequences enter the program. Where
// ranks share the vocabulary, the table has the rows from `first` on: x is zero at the tokens of others.
void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x, int64_t first = 0);

// dtable[token] += dx; the same result for any number of threads: every row sums its tokens in order. Tokens of others
// are passed over; `vocabulary` is then the number of all.
void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable, int64_t first = 0,
                        int64_t vocabulary = 0);

// Bytes of exec.scratch that backward needs.
int64_t embedding_scratch_bytes(DeviceKind device, int64_t tokens);

}  // namespace sb
