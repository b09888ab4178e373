#pragma once

#include <vector>

#include "core/tensor.h"
#include "parallel/grid.h"
#include "parallel/model_layout.h"

namespace sb {

// Brings tensors that are spread over the grid to rank 0, one at a time. All ranks ask for the same tensors in the same
// order.
class TensorCollector {
 public:
  TensorCollector(Grid& grid, const ModelLayout& layout) : grid_(grid), layout_(layout) {}

  // Of a flat buffer that all replicas hold (`own`: this rank's). On rank 0: the values, until the next call; nullptr
  // elsewhere.
  const float* replicated(const ModelLayout::Tensor& tensor, TensorView own);
  // Of a buffer that the replicas share (`own`: this rank's shard).
  const float* sharded(const ModelLayout::Tensor& tensor, TensorView own);

 private:
  struct Source {
    int rank;       // in the world
    int64_t place;  // in its buffer
    int64_t count;
  };
  const float* collect(const std::vector<Source>& sources, TensorView own);

  Grid& grid_;
  const ModelLayout& layout_;
  std::vector<float> buffer_;
};

}  // namespace sb
