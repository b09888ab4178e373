#pragma once

#include "ops/fp8/fp8.h"

namespace sb::cpu {

// The reference of the GPU's rounding, for tests: it takes memory as it goes.
void fp8_quantize(const Exec& exec, TensorView x, const Fp8Matrix& to);
void fp8_multiply(const Exec& exec, const Fp8Operand& a, const Fp8Operand& b, TensorView bias, TensorView c,
                  TensorView d);

}  // namespace sb::cpu

namespace sb::cuda {

void fp8_quantize(const Exec& exec, TensorView x, const Fp8Matrix& to, TensorView largest);
void fp8_swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, const Fp8Matrix& dgate_up,
                         const Fp8Matrix& h);
void fp8_multiply(const Exec& exec, const Fp8Operand& a, const Fp8Operand& b, TensorView bias, TensorView c,
                  TensorView d);

}  // namespace sb::cuda
