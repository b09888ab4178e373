#include "ops/fp8/fp8.h"

#include "device/memory.h"
#include "ops/check_shape.h"
#include "ops/fp8/backends.h"
#include "ops/swiglu.h"

namespace sb {
namespace {

constexpr int64_t kScales = 2;

}  // namespace

Fp8Matrix fp8_allocate(Arena& arena, int64_t rows, int64_t columns, Fp8Layout layout) {
  Fp8Matrix matrix;
  matrix.rows = rows;
  matrix.columns = columns;
  if (layout != Fp8Layout::by_column) matrix.by_row = arena.allocate_array<uint8_t>(rows * columns);
  if (layout != Fp8Layout::by_row) matrix.by_column = arena.allocate_array<uint8_t>(columns * fp8_padded(rows));
  matrix.scale = arena.allocate_array<float>(kScales);
  return matrix;
}

int64_t fp8_bytes(int64_t rows, int64_t columns, Fp8Layout layout) {
  int64_t bytes = Arena::rounded(kScales * static_cast<int64_t>(sizeof(float)));
  if (layout != Fp8Layout::by_column) bytes += Arena::rounded(rows * columns);
  if (layout != Fp8Layout::by_row) bytes += Arena::rounded(columns * fp8_padded(rows));
  return bytes;
}

void fp8_quantize(const Exec& exec, TensorView x, const Fp8Matrix& to, TensorView largest) {
  check_operand(exec, "fp8_quantize", "x", x, x.dtype(), {to.rows, to.columns});
  SB_CHECK(to.columns % kFp8Multiple == 0, "fp8_quantize: {} columns, not a multiple of {}", to.columns, kFp8Multiple);
  if (!largest.empty()) check_operand(exec, "fp8_quantize", "largest", largest, DType::f32, {1});
  if (exec.device == DeviceKind::cuda) return cuda::fp8_quantize(exec, x, to, largest);
  SB_CHECK(largest.empty(), "fp8_quantize: no largest magnitudes on the CPU");
  cpu::fp8_quantize(exec, x, to);
}

void fp8_swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, const Fp8Matrix& dgate_up,
                         const Fp8Matrix& h) {
  const Shape wide = {dh.dim(0), 2 * dh.dim(1)};
  check_operand(exec, "fp8_swiglu_backward", "gate_up", gate_up, dh.dtype(), wide);
  check_operand(exec, "fp8_swiglu_backward", "dh", dh, dh.dtype(), {dh.dim(0), dh.dim(1)});
  SB_CHECK(dgate_up.rows == wide[0] && dgate_up.columns == wide[1] && dgate_up.by_row && dgate_up.by_column &&
               h.rows == wide[0] && 2 * h.columns == wide[1] && !h.by_row && h.by_column,
           "fp8_swiglu_backward: results of other sizes or layouts");
  SB_CHECK(h.columns % kFp8Multiple == 0, "fp8_swiglu_backward: {} columns", h.columns);
  if (exec.device == DeviceKind::cuda) return cuda::fp8_swiglu_backward(exec, gate_up, dh, dgate_up, h);
  swiglu_backward(exec, gate_up, dh, gate_up, dh);
  fp8_quantize(exec, gate_up, dgate_up);
  fp8_quantize(exec, dh, h);
}

Fp8Operand fp8_rows(const Fp8Matrix& matrix) {
  SB_CHECK(matrix.by_row != nullptr, "an fp8 matrix without its rows");
  return {matrix.by_row, matrix.rows, matrix.columns, matrix.scale + 1};
}

Fp8Operand fp8_columns(const Fp8Matrix& matrix) {
  SB_CHECK(matrix.by_column != nullptr, "an fp8 matrix without its columns");
  return {matrix.by_column, matrix.columns, fp8_padded(matrix.rows), matrix.scale + 1};
}

void fp8_multiply(const Exec& exec, const Fp8Operand& a, const Fp8Operand& b, TensorView bias, TensorView c,
                  TensorView d) {
  SB_CHECK(a.length == b.length && a.length % kFp8Multiple == 0, "fp8_multiply: sums over {} and {} codes", a.length,
           b.length);
  check_operand(exec, "fp8_multiply", "d", d, d.dtype(), {a.count, b.count});
  if (!bias.empty()) check_operand(exec, "fp8_multiply", "bias", bias, d.dtype(), {b.count});
  if (!c.empty()) check_operand(exec, "fp8_multiply", "c", c, d.dtype(), d.shape());
  if (d.elements() == 0) return;
  if (a.length == 0) {
    SB_CHECK(bias.empty() && (c.empty() || c.raw() == d.raw()), "fp8_multiply: nothing to sum, but something to add");
    if (c.empty()) zero_tensor(exec, d);
    return;
  }
  if (exec.device == DeviceKind::cuda) return cuda::fp8_multiply(exec, a, b, bias, c, d);
  cpu::fp8_multiply(exec, a, b, bias, c, d);
}

}  // namespace sb
