#include "model/layer_product.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "ops/linear.h"

namespace sb {

void LayerProduct::declare_adapter(StageParameters& parameters, int layer, const std::string& name,
                                   std::vector<AdaptedProduct::Module> modules) {
  const LoraConfig& lora = parameters.lora();
  std::erase_if(modules, [&](const AdaptedProduct::Module& module) { return !lora.is_target(module.name); });
  adapter_ = {std::move(modules), lora.rank, static_cast<float>(lora.scale())};
  layer_ = layer;
  if (adapter_.empty()) return;
  std::vector<Parameter::Part> a, b;
  const Parameter& weight = weight_.set->parameter(weight_.index);
  int64_t row = 0;
  for (const AdaptedProduct::Module& module : adapter_.modules) {
    // Of a product that ranks share by rows of W each has its rows of B, by columns its columns of A; the other factor
    // they have alike.
    const auto part = std::ranges::find(weight.parts, module.first, &Parameter::Part::row_begin);
    SB_CHECK(part != weight.parts.end(), "{} has no part of its own in {}", lora_module_name(module.name), weight.name);
    const bool by_columns = part->cut.axis == TensorCut::Axis::columns;
    if (by_columns) first_input_ = part->cut.begin;
    const std::string hf = fmt::format("{}model.layers.{}.{}.", kPeftPrefix, layer, lora_module_path(module.name));
    const auto before = static_cast<int64_t>(a.size()) * lora.rank;
    a.push_back(
        {hf + "lora_A.weight", before, before + lora.rank, by_columns ? part->cut : parameters.share().whole()});
    b.push_back({hf + "lora_B.weight", row, row + module.columns, by_columns ? parameters.share().whole() : part->cut});
    row += module.columns;
  }
  const std::string own = fmt::format("layers.{}.{}.lora_", layer, name);
  const int64_t inputs = weight.shape[1];
  adapter_a_ = parameters.declare_adapter(own + "A", {adapter_.rank_width(), inputs}, std::move(a));
  adapter_b_ = parameters.declare_adapter(own + "B", {row, lora.rank}, std::move(b));
}

void LayerProduct::keep_codes(Arena& arena) {
  const Shape shape = weight_.weight().shape();
  codes_ = fp8_allocate(arena, shape[0], shape[1], Fp8Layout::both);
}

void LayerProduct::round_weight(const Exec& exec) const {
  if (codes_.by_row) fp8_quantize(exec, weight_.weight(), codes_);
}

void LayerProduct::forward(const LayerRun& run, int64_t begin, const ProductRows& x, TensorView y,
                           TensorView residual) const {
  if (fp8_) {
    ArenaScope scope(run.workspace);
    const Fp8Matrix of_x = rounded(run, x, Fp8Layout::by_row);
    const Fp8Matrix weight = rounded_weight(run, Fp8Layout::by_row);
    fp8_multiply(run.exec, fp8_rows(of_x), fp8_rows(weight), bias_.weight(), residual, y);
  } else {
    linear_forward(run.exec, x.values, weight_.weight(), bias_.weight(), y, residual);
  }
  each_adapted_piece(run, begin, y.dim(0), [&](const AdapterCall& call, int64_t first, int64_t end) {
    adapter_forward(call, x.values.rows(first, end), y.rows(first, end));
  });
}

void LayerProduct::backward_input(const LayerRun& run, int64_t begin, const ProductRows& dy, TensorView dx) const {
  if (fp8_) {
    ArenaScope scope(run.workspace);
    const Fp8Matrix of_dy = rounded(run, dy, Fp8Layout::by_row);
    const Fp8Matrix weight = rounded_weight(run, Fp8Layout::by_column);
    fp8_multiply(run.exec, fp8_rows(of_dy), fp8_columns(weight), {}, {}, dx);
  } else {
    linear_backward_input(run.exec, dy.values, weight_.weight(), dx);
  }
  each_adapted_piece(run, begin, dx.dim(0), [&](const AdapterCall& call, int64_t first, int64_t end) {
    adapter_backward_input(call, dy.values.rows(first, end), dx.rows(first, end));
  });
}

void LayerProduct::add_gradients(const LayerRun& run, int64_t begin, const ProductRows& x,
                                 const ProductRows& dy) const {
  if (run.waiting) return run.waiting->add(*this, begin, x, dy);
  if (weight_.trained() && fp8_) {
    add_fp8_gradients(run, x, dy);
  } else if (weight_.trained()) {
    linear_backward_weight(run.exec, x.values, dy.values, weight_.gradient(), bias_.gradient(),
                           weight_.add_to_gradient());
  }
  each_adapted_piece(run, begin, dy.values.dim(0), [&](const AdapterCall& call, int64_t first, int64_t end) {
    const bool add_to_a = adapter_a_.add_to_gradient(), add_to_b = adapter_b_.add_to_gradient();
    adapter_backward_weights(call, x.values.rows(first, end), dy.values.rows(first, end),
                             {adapter_a_.gradient(), adapter_b_.gradient(), add_to_a, add_to_b});
  });
}

void LayerProduct::add_fp8_gradients(const LayerRun& run, const ProductRows& x, const ProductRows& dy) const {
  ArenaScope scope(run.workspace);
  const Fp8Matrix of_dy = rounded(run, dy, Fp8Layout::by_column), of_x = rounded(run, x, Fp8Layout::by_column);
  const TensorView gradient = weight_.gradient();
  fp8_multiply(run.exec, fp8_columns(of_dy), fp8_columns(of_x), {}, weight_.add_to_gradient() ? gradient : TensorView(),
               gradient);
  if (bias_.trained()) linear_backward_bias(run.exec, dy.values, bias_.gradient());
}

ProductRows LayerProduct::output_gradient(const LayerRun& run, TensorView dy) const {
  if (!fp8_) return dy;
  return {dy, rounded(run, dy, Fp8Layout::both, run.operands())};
}

Fp8Matrix LayerProduct::rounded(const LayerRun& run, const ProductRows& x, Fp8Layout layout) {
  return rounded(run, x, layout, run.workspace);
}

Fp8Matrix LayerProduct::rounded(const LayerRun& run, const ProductRows& x, Fp8Layout layout, Arena& to) {
  const bool made = layout == Fp8Layout::by_row ? x.codes.by_row != nullptr : x.codes.by_column != nullptr;
  if (made) return x.codes;
  const Fp8Matrix matrix = fp8_allocate(to, x.values.dim(0), x.values.dim(1), layout);
  fp8_quantize(run.exec, x.values, matrix, x.largest);
  return matrix;
}

AdapterCall LayerProduct::adapter_call(const LayerRun& run, int64_t begin, int64_t rows) const {
  DropoutRows dropout;
  if (run.dropout.probability > 0) dropout = run.dropout.rows(begin, begin + rows, dropout_stream(layer_));
  dropout.first_channel = first_input_;
  return {run.exec, run.workspace, adapter_, adapter_a_.weight(), adapter_b_.weight(), dropout};
}

template <typename Body>
void LayerProduct::each_adapted_piece(const LayerRun& run, int64_t begin, int64_t rows, const Body& body) const {
  if (adapter_.empty()) return;
  run.each_chunk(rows,
                 [&](int64_t first, int64_t end) { body(adapter_call(run, begin + first, end - first), first, end); });
}

}  // namespace sb
