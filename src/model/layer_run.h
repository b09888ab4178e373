#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attention.h"
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
  int64_t chunk;             // tokens at a time through projections and MLP
  DropoutRows dropout = {};  // of the adapters' inputs; nothing is dropped but in training

  // body(begin, end) for all tokens, a piece at a time.
  template <typename Body>
  void each_piece(int64_t tokens, const Body& body) const {
    for (int64_t begin = 0; begin < tokens; begin += chunk) body(begin, std::min(tokens, begin + chunk));
  }
};

}  // namespace sb
