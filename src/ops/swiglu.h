#pragma once

#include "device/exec.h"

namespace sb {

// gate_up [T, 2·I] holds the gate's I columns, then the up projection's. h [T, I] = silu(gate) · up.
// `largest` [1], where it is given (on CUDA alone): fp32, zero, gets the largest magnitude of h.
void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h, TensorView largest = {});

// dgate_up [T, 2·I]; may alias gate_up. Unless empty, h [T, I] gets what forward gave, in the same pass; it may alias
// dh.
void swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, TensorView dgate_up, TensorView h = {});

}  // namespace sb
