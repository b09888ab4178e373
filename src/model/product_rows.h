#pragma once

#include "core/tensor.h"
#include "ops/fp8/fp8.h"

namespace sb {

// Rows that a product reads; of an fp8 product their largest magnitude [1] or their codes, where they are there
// already.
struct ProductRows {
  TensorView values, largest = {};
  Fp8Matrix codes = {};
  ProductRows(TensorView rows) : values(rows) {}
  ProductRows(TensorView rows, TensorView known) : values(rows), largest(known) {}
  ProductRows(TensorView rows, const Fp8Matrix& rounded) : values(rows), codes(rounded) {}
};

}  // namespace sb
