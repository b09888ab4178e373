#include "model/waiting_gradients.h"

#include "core/errors.h"
#include "device/memory.h"
#include "model/layer_product.h"

namespace sb {

WaitingGradients::WaitingGradients(int64_t bytes, DeviceKind device)
    : memory_(make_arena("waiting gradients", bytes, device)) {}

void WaitingGradients::add(const LayerProduct& product, int64_t begin, const ProductRows& x, const ProductRows& dy) {
  products_.push_back({&product, begin, x, dy});
}

void WaitingGradients::compute_layer(const LayerRun& run) {
  SB_CHECK(run.waiting == nullptr && layers_computed_ < ends_.size(), "layer {} of {} whose gradients wait",
           layers_computed_, ends_.size());
  for (const size_t end = ends_[layers_computed_]; computed_ < end; ++computed_) {
    const Product& next = products_[computed_];
    next.product->add_gradients(run, next.begin, next.x, next.dy);
  }
  if (++layers_computed_ < ends_.size()) return;
  products_.clear();
  ends_.clear();
  layers_computed_ = computed_ = 0;
  memory_.release(0);
}

}  // namespace sb
