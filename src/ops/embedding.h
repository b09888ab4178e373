#pragma once

#include "device/exec.h"

namespace sb {

// x [T, H] = table [V, H] at tokens [T] (i32). Token ids are checked against V where sequences enter the program.
void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x);

// dtable[token] += dx; the same result for any number of threads: every row sums its tokens in order.
void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable);

// Bytes of exec.scratch that backward needs.
int64_t embedding_scratch_bytes(DeviceKind device, int64_t tokens);

}  // namespace sb
