#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attention.h"
#include "model/tensor_parallel/shared_rows.h"
#include "model/waiting_gradients.h"
#include "ops/dropout.h"

namespace sb {

// What a layer needs to run, besides its parameters.
struct LayerRun {
  const Exec& exec;
  Arena& workspace;  // temporaries of the layer
  Attention& attention;
  PackedSequences sequences;
  TensorView positions;      // [T]
  TensorView cos, sin;       // rope table
  const SharedRows& rows;    // tokens in pieces through projections and MLP, with the ranks that share these
  int64_t chunk;             // of such a piece, at most
  DropoutRows dropout = {};  // of the adapters' inputs; nothing is dropped but in training
  // In backward: where the weights' gradients wait; null: they are computed at once.
  WaitingGradients* waiting = nullptr;

  int64_t tokens() const { return positions.dim(0); }
  // Where what the weights' gradients are computed from lies.
  Arena& operands() const { return waiting ? waiting->memory() : workspace; }
  // body(begin, end) for so many rows, some at a time.
  template <typename Body>
  void each_chunk(int64_t count, const Body& body) const {
    for (int64_t begin = 0; begin < count; begin += chunk) body(begin, std::min(count, begin + chunk));
  }
};

}  // namespace sb
