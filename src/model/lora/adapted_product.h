#pragma once

#include <cstdint>
#include <vector>

#include "device/exec.h"
#include "model/lora/lora_config.h"
#include "ops/dropout.h"

namespace sb {

// The adapters of one product of a layer. A product may compute several modules at once (q, k and v): each adapter adds
// to its own columns of the output. Their A lie below each other in one matrix [modules · rank, in], their B in one
// [Σ columns, rank].
struct AdaptedProduct {
  struct Module {
    LoraModule name;
    int64_t first, columns;  // of the product's output
  };
  std::vector<Module> modules;  // none: no adapter
  int64_t rank = 0;
  float scale = 1;

  bool empty() const { return modules.empty(); }
  int64_t rank_width() const { return static_cast<int64_t>(modules.size()) * rank; }
  int64_t output_columns() const;
};

// What the adapters of one product work with, on some rows. Temporaries go to the workspace.
struct AdapterCall {
  const Exec& exec;
  Arena& workspace;
  const AdaptedProduct& product;
  TensorView a, b;
  DropoutRows dropout;  // of these rows; its stream is the layer's
};

// y += scale · B·A·dropout(x), module by module.
void adapter_forward(const AdapterCall& call, TensorView x, TensorView y);
// dx += the adapters' part of the gradient of x.
void adapter_backward_input(const AdapterCall& call, TensorView dy, TensorView dx);
// da, db: fp32; each is added to, or written where its flag is not set.
struct AdapterGradients {
  TensorView a, b;
  bool add_to_a, add_to_b;
};
void adapter_backward_weights(const AdapterCall& call, TensorView x, TensorView dy, const AdapterGradients& to);

// Most that any of these takes of the workspace for so many rows of at most `inputs` columns.
int64_t adapter_workspace_bytes(const LoraConfig& lora, int64_t rows, int64_t inputs, DType dtype);

// The streams of random numbers of a layer's modules begin here.
uint32_t dropout_stream(int layer);

}  // namespace sb
