#include "model/lora/adapted_product.h"

#include "ops/column_products.h"

namespace sb {
namespace {

bool drops(const AdapterCall& call) {
  return call.dropout.probability > 0;
}

DropoutRows dropout_of(const AdapterCall& call, LoraModule module) {
  DropoutRows rows = call.dropout;
  rows.stream += static_cast<uint32_t>(module);
  return rows;
}

// body(number of the module, module, its first row of B).
template <typename Body>
void each_module(const AdaptedProduct& product, const Body& body) {
  int64_t row = 0;
  for (size_t i = 0; i < product.modules.size(); ++i) {
    body(static_cast<int64_t>(i), product.modules[i], row);
    row += product.modules[i].columns;
  }
}

TensorView rank_wide(const AdapterCall& call, int64_t rows) {
  return call.workspace.allocate(call.a.dtype(), {rows, call.product.rank_width()});
}

// scale · A·dropout(x) of all modules, [T, modules · rank]. Every module drops other elements of x; where nothing is
// dropped one product does. `visit(number, dropped)` sees the x of each module on the way.
template <typename Visit>
TensorView lower(const AdapterCall& call, TensorView x, const Visit& visit) {
  const AdaptedProduct& product = call.product;
  const TensorView low = rank_wide(call, x.dim(0));
  if (!drops(call)) {
    multiply_transposed(call.exec, Columns(x), call.a, product.scale, Columns(low), /*accumulate=*/false);
    return low;
  }
  ArenaScope scope(call.workspace);
  const TensorView dropped = call.workspace.allocate(x.dtype(), x.shape());
  each_module(product, [&](int64_t i, const AdaptedProduct::Module& module, int64_t) {
    dropout(call.exec, dropout_of(call, module.name), x, dropped);
    multiply_transposed(call.exec, Columns(dropped), call.a.rows(i * product.rank, (i + 1) * product.rank),
                        product.scale, Columns(low, i * product.rank, product.rank), /*accumulate=*/false);
    visit(i, dropped);
  });
  return low;
}

// scale · Bᵀ·dy of all modules: the gradient of A·dropout(x), [T, modules · rank].
TensorView low_gradient(const AdapterCall& call, TensorView dy) {
  const AdaptedProduct& product = call.product;
  const TensorView low = rank_wide(call, dy.dim(0));
  each_module(product, [&](int64_t i, const AdaptedProduct::Module& module, int64_t row) {
    multiply(call.exec, Columns(dy, module.first, module.columns), call.b.rows(row, row + module.columns),
             product.scale, Columns(low, i * product.rank, product.rank), /*accumulate=*/false);
  });
  return low;
}

}  // namespace

int64_t AdaptedProduct::output_columns() const {
  int64_t sum = 0;
  for (const Module& module : modules) sum += module.columns;
  return sum;
}

void adapter_forward(const AdapterCall& call, TensorView x, TensorView y) {
  const AdaptedProduct& product = call.product;
  ArenaScope scope(call.workspace);
  const TensorView low = lower(call, x, [](int64_t, TensorView) {});
  each_module(product, [&](int64_t i, const AdaptedProduct::Module& module, int64_t row) {
    multiply_transposed(call.exec, Columns(low, i * product.rank, product.rank), call.b.rows(row, row + module.columns),
                        1.0f, Columns(y, module.first, module.columns),
                        /*accumulate=*/true);
  });
}

void adapter_backward_input(const AdapterCall& call, TensorView dy, TensorView dx) {
  const AdaptedProduct& product = call.product;
  ArenaScope scope(call.workspace);
  const TensorView dlow = low_gradient(call, dy);
  if (!drops(call)) return multiply(call.exec, Columns(dlow), call.a, 1.0f, Columns(dx), /*accumulate=*/true);
  const TensorView dropped = call.workspace.allocate(dx.dtype(), dx.shape());
  each_module(product, [&](int64_t i, const AdaptedProduct::Module& module, int64_t) {
    multiply(call.exec, Columns(dlow, i * product.rank, product.rank),
             call.a.rows(i * product.rank, (i + 1) * product.rank), 1.0f, Columns(dropped), /*accumulate=*/false);
    add_dropout(call.exec, dropout_of(call, module.name), dropped, dx);
  });
}

void adapter_backward_weights(const AdapterCall& call, TensorView x, TensorView dy, const AdapterGradients& to) {
  const AdaptedProduct& product = call.product;
  ArenaScope scope(call.workspace);
  const TensorView dlow = low_gradient(call, dy);
  const TensorView low = lower(call, x, [&](int64_t i, TensorView dropped) {
    add_outer_products(call.exec, Columns(dlow, i * product.rank, product.rank), Columns(dropped),
                       to.a.rows(i * product.rank, (i + 1) * product.rank), to.add_to_a);
  });
  if (!drops(call)) add_outer_products(call.exec, Columns(dlow), Columns(x), to.a, to.add_to_a);
  each_module(product, [&](int64_t i, const AdaptedProduct::Module& module, int64_t row) {
    add_outer_products(call.exec, Columns(dy, module.first, module.columns),
                       Columns(low, i * product.rank, product.rank), to.b.rows(row, row + module.columns), to.add_to_b);
  });
}

int64_t adapter_workspace_bytes(const LoraConfig& lora, int64_t rows, int64_t inputs, DType dtype) {
  if (!lora.enabled()) return 0;
  constexpr int64_t kMostModules = 3;  // q, k and v
  const int64_t low = Arena::rounded(rows * kMostModules * lora.rank * dtype_bytes(dtype));
  return 2 * low + (lora.dropout > 0 ? Arena::rounded(rows * inputs * dtype_bytes(dtype)) : 0);
}

uint32_t dropout_stream(int layer) {
  static_assert(kLoraModules <= 8);
  return static_cast<uint32_t>(layer) * 8;
}

}  // namespace sb
