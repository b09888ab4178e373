#pragma once

#include <cstdint>

#include "device/exec.h"

namespace sb {

// A matrix [rows, columns] rounded to e4m3 codes with one scale for all of it, from its own largest magnitude: nothing
// is remembered from one call to the next. In one or both layouts: products read both operands along the sum.
struct Fp8Matrix {
  int64_t rows = 0, columns = 0;
  uint8_t* by_row = nullptr;     // [rows, columns]
  uint8_t* by_column = nullptr;  // [columns, fp8_padded(rows)], zeros beyond `rows`
  float* scale = nullptr;        // [2]: the largest magnitude, and what a code is worth
};

enum class Fp8Layout { by_row, by_column, both };

// cuBLASLt wants sums over a multiple of 16 codes.
inline constexpr int64_t kFp8Multiple = 16;
constexpr int64_t fp8_padded(int64_t count) {
  return (count + kFp8Multiple - 1) / kFp8Multiple * kFp8Multiple;
}

// `columns` is a multiple of kFp8Multiple.
Fp8Matrix fp8_allocate(Arena& arena, int64_t rows, int64_t columns, Fp8Layout layout);
int64_t fp8_bytes(int64_t rows, int64_t columns, Fp8Layout layout);
// Rounds x [rows, columns], in the layouts that `to` has. Numbers that are not finite make products that are not.
// `largest` [1]: the largest magnitude in x, where whoever wrote x has noted it (on CUDA).
void fp8_quantize(const Exec& exec, TensorView x, const Fp8Matrix& to, TensorView largest = {});

// swiglu_backward (ops/swiglu.h) whose results are codes: of dgate_up [T, 2·I] in both layouts, and of h [T, I] by
// column. gate_up and dh may be overwritten.
void fp8_swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, const Fp8Matrix& dgate_up,
                         const Fp8Matrix& h);

// One side of a product: `count` rows of `length` codes.
struct Fp8Operand {
  const uint8_t* codes;
  int64_t count, length;
  const float* scale;
};
Fp8Operand fp8_rows(const Fp8Matrix& matrix);
Fp8Operand fp8_columns(const Fp8Matrix& matrix);

// d [a.count, b.count] = a · bᵀ + bias + c, summed in fp32; an empty bias or c is none, and c may be d.
void fp8_multiply(const Exec& exec, const Fp8Operand& a, const Fp8Operand& b, TensorView bias, TensorView c,
                  TensorView d);

}  // namespace sb
