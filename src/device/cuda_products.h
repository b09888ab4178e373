#pragma once

#include <cstdint>
#include <memory>

#include "core/dtype.h"

namespace sb {

// D [m, n] = scale · op(A) · op(B) + C + bias on CUDA, row-major, summed in fp32. op(A) is m × k and op(B) is k × n;
// with the transpose flag the matrix is stored the other way round.
struct CudaProduct {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  bool fp8 = false;  // A and B are e4m3 codes, stored along the sum (transpose_b alone), 16 bytes aligned
  DType input = DType::bf16, output = DType::bf16;  // of A and B; of C, D and bias
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;  // none; may be d
  void* d = nullptr;
  const void* bias = nullptr;  // [n], added to every row; none
  // Distances between stored rows; 0: they follow each other. C's are those of D.
  int64_t lda = 0, ldb = 0, ldd = 0;
  float scale = 1.0f;
  // fp8: what a code of A or B is worth, on the device.
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
};

// Matrix products through cuBLASLt on one stream: handle, workspace and the algorithm chosen for every kind of product.
// An algorithm is chosen when a kind (sizes, types, alignment) is met first and kept, so that a product repeated gives
// the same bits. fp32 stays fp32 (no TF32). Not thread-safe: one owner.
class CudaProducts {
 public:
  CudaProducts();
  ~CudaProducts();
  void run(void* stream, const CudaProduct& product);
  // From now on candidates are timed on the operands at hand when a kind is met first, instead of going by the
  // library's proposals. Faster products, but which algorithm wins may differ from one process to the next.
  void measure_algorithms(bool measure);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace sb
