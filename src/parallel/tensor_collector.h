#pragma once

#include <functional>
#include <vector>

#include "core/tensor.h"
#include "parallel/grid.h"
#include "parallel/model_layout.h"

namespace sb {

// Brings tensors that are spread over the grid to rank 0, one at a time, in fp32 whatever the buffers hold. All ranks
// ask for the same tensors in the same order.
class TensorCollector {
 public:
  TensorCollector(Grid& grid, const ModelLayout& layout) : grid_(grid), layout_(layout) {}

  // Of a flat buffer that all replicas hold (`own`: this rank's). On rank 0: the whole tensor's values, until the next
  // call; nullptr elsewhere.
  const float* replicated(const ModelLayout::Tensor& tensor, TensorView own);
  // Of a buffer that the replicas share (`own`: this rank's shard).
  const float* sharded(const ModelLayout::Tensor& tensor, TensorView own);

 private:
  struct Source {
    int rank;       // in the world
    int64_t place;  // in its buffer
    int64_t count;
  };
  using Sources = std::function<std::vector<Source>(const ModelLayout::Tensor::Part& part)>;
  const float* collect(const ModelLayout::Tensor& tensor, const Sources& sources_of, TensorView own);
  // To `into` on rank 0.
  void fetch(const std::vector<Source>& sources, TensorView own, float* into);

  Grid& grid_;
  const ModelLayout& layout_;
  std::vector<float> buffer_, part_;
};

}  // namespace sb
