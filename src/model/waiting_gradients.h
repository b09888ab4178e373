#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "model/product_rows.h"

namespace sb {

class LayerProduct;
struct LayerRun;

// The weights' gradients of one micro-batch's products, put off until the gradient of the stage's input is on its way:
// nobody waits for them before the end of the step. What they are computed from stays here until then.
class WaitingGradients {
 public:
  WaitingGradients(int64_t bytes, DeviceKind device);

  // Where backward puts what these gradients need; all of it is released when the last one is computed.
  Arena& memory() { return memory_; }
  const Arena& memory() const { return memory_; }
  bool empty() const { return products_.empty(); }

  void add(const LayerProduct& product, int64_t begin, const ProductRows& x, const ProductRows& dy);
  // What was added since the last call is all of one layer.
  void end_layer() { ends_.push_back(products_.size()); }
  // Computes those of the next layer, in the order in which layers and products came in.
  void compute_layer(const LayerRun& run);

 private:
  struct Product {
    const LayerProduct* product;
    int64_t begin;
    ProductRows x, dy;
  };
  Arena memory_;
  std::vector<Product> products_;
  std::vector<size_t> ends_;  // of the layers in it
  size_t layers_computed_ = 0, computed_ = 0;
};

}  // namespace sb
