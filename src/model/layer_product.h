#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/layer_run.h"
#include "model/lora/adapted_product.h"
#include "model/parameters.h"
#include "model/product_rows.h"

namespace sb {

// One product of a layer, y = x·Wᵀ + bias, with its low-rank adapters where it has any. `begin` is where the rows of x
// and y begin in the micro-batch.
class LayerProduct {
 public:
  LayerProduct() = default;
  explicit LayerProduct(ParameterPlace weight, ParameterPlace bias = {}) : weight_(weight), bias_(bias) {}
  // Declares adapters for those of `modules` that are targets; `name` is the product's within the layer.
  void declare_adapter(StageParameters& parameters, int layer, const std::string& name,
                       std::vector<AdaptedProduct::Module> modules);

  // From here on the product itself (not its adapters, nor the bias) is one of e4m3 codes.
  void use_fp8() { fp8_ = true; }
  // The codes of the weight stay in `arena`, where round_weight() puts them; otherwise they are made for every product.
  void keep_codes(Arena& arena);
  void round_weight(const Exec& exec) const;

  // The residual, none where it is empty, may be y itself.
  void forward(const LayerRun& run, int64_t begin, const ProductRows& x, TensorView y, TensorView residual = {}) const;
  void backward_input(const LayerRun& run, int64_t begin, const ProductRows& dy, TensorView dx) const;
  // Adds the gradients of all that is trained here, at once or, with run.waiting, later.
  void add_gradients(const LayerRun& run, int64_t begin, const ProductRows& x, const ProductRows& dy) const;
  // dy for the two above, so that what they both need of it is made once; in run.operands().
  ProductRows output_gradient(const LayerRun& run, TensorView dy) const;

 private:
  static Fp8Matrix rounded(const LayerRun& run, const ProductRows& x, Fp8Layout layout);
  static Fp8Matrix rounded(const LayerRun& run, const ProductRows& x, Fp8Layout layout, Arena& to);
  Fp8Matrix rounded_weight(const LayerRun& run, Fp8Layout layout) const {
    return rounded(run, {weight_.weight(), codes_}, layout);
  }
  void add_fp8_gradients(const LayerRun& run, const ProductRows& x, const ProductRows& dy) const;
  AdapterCall adapter_call(const LayerRun& run, int64_t begin, int64_t rows) const;
  // body(call, first row, end) for the adapters, some rows at a time: their temporaries are for run.chunk of them.
  template <typename Body>
  void each_adapted_piece(const LayerRun& run, int64_t begin, int64_t rows, const Body& body) const;

  ParameterPlace weight_, bias_;
  AdaptedProduct adapter_;
  ParameterPlace adapter_a_, adapter_b_;
  int layer_ = 0;
  int64_t first_input_ = 0;  // of the whole product's, where ranks share them
  bool fp8_ = false;
  Fp8Matrix codes_;  // of the weight, in both layouts; empty where they are not kept
};

}  // namespace sb
