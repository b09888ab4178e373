#pragma once

#include <span>
#include <vector>

#include "core/tensor.h"
#include "parallel/grid.h"
#include "parallel/model_layout.h"

namespace sb {

// Brings tensors that are spread over the grid together, in fp32 whatever the buffers hold. All ranks ask for the same
// tensors in the same order.
class TensorCollector {
 public:
  TensorCollector(Grid& grid, const ModelLayout& layout) : grid_(grid), layout_(layout) {}

  struct Wanted {
    const ModelLayout::Tensor* tensor;
    TensorView own;        // this rank's buffer
    bool sharded = false;  // the replicas share that; otherwise each of them holds all of it
    int to = 0;            // rank in the world that gets the whole tensor
  };
  // At most one for each rank, all at the same time. The values of the one that is for this rank, until the next call:
  // in `into` where that is given; nullptr where none is.
  const float* collect(std::span<const Wanted> round, float* into = nullptr);

 private:
  struct Source {
    int rank;       // in the world
    int64_t place;  // in its buffer
    int64_t count;
  };
  std::vector<Source> sources_of(const Wanted& wanted, const ModelLayout::Tensor::Part& part) const;
  const float* receive(const Wanted& wanted, float* into);
  void receive_part(const Wanted& wanted, const ModelLayout::Tensor::Part& part, float* into);

  Grid& grid_;
  const ModelLayout& layout_;
  std::vector<float> buffer_, part_;
};

}  // namespace sb
