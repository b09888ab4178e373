#include "ops/column_products.h"

#include "ops/backends.h"
#include "ops/check_shape.h"

namespace sb {
namespace {

void check_columns(const Exec& exec, const char* operation, const char* name, const Columns& columns, DType dtype,
                   int64_t rows) {
  check_operand(exec, operation, name, columns.matrix, dtype, {rows, columns.width()});
  SB_CHECK(0 <= columns.first && columns.count > 0 && columns.first + columns.count <= columns.width(),
           "{}: {}: columns {} to {} of {}", operation, name, columns.first, columns.first + columns.count,
           columns.width());
}

}  // namespace

void multiply_transposed(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y,
                         bool accumulate) {
  check_columns(exec, "multiply_transposed", "x", x, x.matrix.dtype(), x.rows());
  check_columns(exec, "multiply_transposed", "y", y, x.matrix.dtype(), x.rows());
  check_operand(exec, "multiply_transposed", "weight", weight, x.matrix.dtype(), {y.count, x.count});
  SB_CHECK(!accumulate || scale == 1.0f, "multiply_transposed: a scale of {} and a sum", scale);
  if (x.rows() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::multiply_transposed(exec, x, weight, scale, y, accumulate);
  cpu::multiply_transposed(exec, x, weight, scale, y, accumulate);
}

void multiply(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y, bool accumulate) {
  check_columns(exec, "multiply", "x", x, x.matrix.dtype(), x.rows());
  check_columns(exec, "multiply", "y", y, x.matrix.dtype(), x.rows());
  check_operand(exec, "multiply", "weight", weight, x.matrix.dtype(), {x.count, y.count});
  SB_CHECK(!accumulate || scale == 1.0f, "multiply: a scale of {} and a sum", scale);
  if (x.rows() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::multiply(exec, x, weight, scale, y, accumulate);
  cpu::multiply(exec, x, weight, scale, y, accumulate);
}

void add_outer_products(const Exec& exec, const Columns& dy, const Columns& x, TensorView gradient, bool accumulate) {
  check_columns(exec, "add_outer_products", "dy", dy, x.matrix.dtype(), x.rows());
  check_columns(exec, "add_outer_products", "x", x, x.matrix.dtype(), x.rows());
  check_operand(exec, "add_outer_products", "gradient", gradient, DType::f32, {dy.count, x.count});
  SB_CHECK(x.rows() > 0, "add_outer_products: no rows");
  if (exec.device == DeviceKind::cuda) return cuda::add_outer_products(exec, dy, x, gradient, accumulate);
  cpu::add_outer_products(exec, dy, x, gradient, accumulate);
}

}  // namespace sb
