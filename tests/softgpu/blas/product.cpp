#include "softgpu/blas/product.h"

#include <cblas.h>

#include <bit>
#include <vector>

namespace softgpu {
namespace {

float value_of(const void* data, Element type, size_t at) {
  switch (type) {
    case Element::f32:
      return static_cast<const float*>(data)[at];
    case Element::bf16:
      return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(data)[at]} << 16);
    case Element::e4m3: {
      const uint8_t code = static_cast<const uint8_t*>(data)[at];
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      if ((code & 0x7F) == 0x7F) return std::bit_cast<float>(0x7FFFFFFFu);
      const float magnitude = exponent == 0
                                  ? static_cast<float>(mantissa) * 0x1p-9f
                                  : std::bit_cast<float>(uint32_t(exponent + 120) << 23 | uint32_t(mantissa) << 20);
      return (code & 0x80) != 0 ? -magnitude : magnitude;
    }
  }
  return 0;
}

void store(float value, void* data, Element type, size_t at) {
  if (type == Element::f32) {
    static_cast<float*>(data)[at] = value;
    return;
  }
  // bf16: to the nearest, ties to even; every NaN is the GPU's.
  const auto bits = std::bit_cast<uint32_t>(value);
  static_cast<uint16_t*>(data)[at] = (bits & 0x7FFFFFFF) > 0x7F800000
                                         ? uint16_t{0x7FFF}
                                         : static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// The matrix in fp32, its columns one after the other.
std::vector<float> dense(const Matrix& matrix, const void* data) {
  std::vector<float> values(matrix.rows * matrix.columns);
  for (uint64_t column = 0; column < matrix.columns; ++column)
    for (uint64_t row = 0; row < matrix.rows; ++row)
      values[column * matrix.rows + row] =
          value_of(data, matrix.type, column * static_cast<uint64_t>(matrix.distance) + row);
  return values;
}

}  // namespace

size_t element_bytes(Element type) {
  return type == Element::f32 ? 4 : type == Element::bf16 ? 2 : 1;
}

size_t Matrix::bytes() const {
  return columns == 0 || rows == 0 ? 0 : ((columns - 1) * static_cast<uint64_t>(distance) + rows) * element_bytes(type);
}

void multiply(const Product& p) {
  // Ranks are threads that take the device in turn.
  static const bool one_thread = (openblas_set_num_threads(1), true);
  (void)one_thread;
  const std::vector<float> a = dense(p.a, p.a_data), b = dense(p.b, p.b_data);
  std::vector<float> sums(p.m() * p.n());
  const uint64_t m = p.m(), n = p.n(), k = p.k();
  const auto whole = [](uint64_t value) { return static_cast<blasint>(value); };
  for (int part = 0; part < p.parts; ++part) {
    const uint64_t from = k * static_cast<uint64_t>(part) / static_cast<uint64_t>(p.parts);
    const uint64_t to = k * static_cast<uint64_t>(part + 1) / static_cast<uint64_t>(p.parts);
    cblas_sgemm(CblasColMajor, p.transpose_a ? CblasTrans : CblasNoTrans, p.transpose_b ? CblasTrans : CblasNoTrans,
                whole(m), whole(n), whole(to - from), 1.0f, a.data() + (p.transpose_a ? from : from * p.a.rows),
                whole(p.a.rows), b.data() + (p.transpose_b ? from * p.b.rows : from), whole(p.b.rows),
                part == 0 ? 0.0f : 1.0f, sums.data(), whole(m));
  }
  const float scale = p.alpha * (p.a_scale != nullptr ? *p.a_scale : 1.0f) * (p.b_scale != nullptr ? *p.b_scale : 1.0f);
  for (uint64_t column = 0; column < n; ++column)
    for (uint64_t row = 0; row < m; ++row) {
      const size_t at = column * static_cast<uint64_t>(p.d.distance) + row;
      float value = scale * sums[column * m + row];
      if (p.beta != 0) value += p.beta * value_of(p.c_data, p.d.type, at);
      if (p.bias != nullptr) value += value_of(p.bias, p.d.type, row);
      store(value, p.d_data, p.d.type, at);
    }
}

}  // namespace softgpu
