#include <algorithm>
#include <cstring>
#include <vector>

#include "device/blas.h"
#include "ops/fp8/backends.h"
#include "ops/fp8/e4m3.h"

namespace sb::cpu {
namespace {

std::vector<float> values_of(const Fp8Operand& operand) {
  std::vector<float> values(static_cast<size_t>(operand.count * operand.length));
  std::transform(operand.codes, operand.codes + values.size(), values.begin(), float_from_e4m3);
  return values;
}

// By its bits, so that what is no number counts as the largest.
float largest_magnitude(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  return std::bit_cast<float>(largest);
}

}  // namespace

void fp8_quantize(const Exec&, TensorView x, const Fp8Matrix& to) {
  const float* values = x.f32();
  to.scale[0] = largest_magnitude(values, x.elements());
  const Fp8Scale scale = fp8_scale(to.scale[0]);
  to.scale[1] = scale.worth;
  const int64_t padded = fp8_padded(to.rows);
  if (to.by_column) std::memset(to.by_column, 0, static_cast<size_t>(to.columns * padded));
  for (int64_t row = 0; row < to.rows; ++row) {
    for (int64_t column = 0; column < to.columns; ++column) {
      const uint8_t code = e4m3_from_float(values[row * to.columns + column] * scale.factor);
      if (to.by_row) to.by_row[row * to.columns + column] = code;
      if (to.by_column) to.by_column[column * padded + row] = code;
    }
  }
}

void fp8_multiply(const Exec& exec, const Fp8Operand& a, const Fp8Operand& b, TensorView bias, TensorView c,
                  TensorView d) {
  const std::vector<float> of_a = values_of(a), of_b = values_of(b);
  std::vector<float> sums(static_cast<size_t>(d.elements()));
  parallel_sgemm(*exec.pool, {.transpose_b = true,
                              .m = a.count,
                              .n = b.count,
                              .k = a.length,
                              .a = of_a.data(),
                              .lda = a.length,
                              .b = of_b.data(),
                              .ldb = b.length,
                              .c = sums.data(),
                              .ldc = b.count});
  const float scale = *a.scale * *b.scale;
  for (int64_t row = 0; row < a.count; ++row) {
    for (int64_t column = 0; column < b.count; ++column) {
      const int64_t i = row * b.count + column;
      float sum = sums[static_cast<size_t>(i)] * scale;
      if (!bias.empty()) sum += bias.f32()[column];
      if (!c.empty()) sum += c.f32()[i];
      d.f32()[i] = sum;
    }
  }
}

}  // namespace sb::cpu
