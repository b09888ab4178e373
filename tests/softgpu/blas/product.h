#pragma once

// A matrix product as cuBLASLt describes it, computed on the CPU: column-major, summed in fp32.

#include <cstddef>
#include <cstdint>

namespace softgpu {

enum class Element : uint32_t { f32, bf16, e4m3 };
size_t element_bytes(Element type);

struct Matrix {
  Element type = Element::f32;
  uint64_t rows = 0, columns = 0;
  int64_t distance = 0;  // between columns, in elements
  // From the first element to behind the last.
  size_t bytes() const;
};

struct Product {
  Matrix a, b, d;
  bool transpose_a = false, transpose_b = false;
  uint64_t m() const { return d.rows; }
  uint64_t n() const { return d.columns; }
  uint64_t k() const { return transpose_a ? a.rows : a.columns; }
  float alpha = 1, beta = 0;
  const void* a_data = nullptr;
  const void* b_data = nullptr;
  const void* c_data = nullptr;  // laid out as d
  void* d_data = nullptr;
  const void* bias = nullptr;      // one for every row of d, of its type; none
  const float* a_scale = nullptr;  // none: 1
  const float* b_scale = nullptr;
  // Sums are taken over so many parts of k, and those added: another order, as another algorithm of the library's has.
  int parts = 1;
};

void multiply(const Product& product);

}  // namespace softgpu
