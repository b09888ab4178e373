#pragma once

#include <cstdint>

#include "device/exec.h"

namespace sb {

// Which elements of rows are dropped. Whether one is, is a pure function of (key, sequence, position, stream, channel):
// not of where in memory it lies, nor of what else is computed, or how often.
struct DropoutRows {
  double probability = 0;     // to a 65536th; 0: nothing is dropped
  uint64_t key = 0;           // of the seed and the step: dropout_key()
  uint32_t stream = 0;        // of the layer and the product
  TensorView sequences;       // [T] i32: the number of every row's sequence in the data (its lower half)
  TensorView positions;       // [T] i32: in its sequence
  int64_t first_channel = 0;  // where ranks share the channels; on CUDA a multiple of 8

  DropoutRows rows(int64_t begin, int64_t end, uint32_t own_stream) const {
    return {probability, key, own_stream, sequences.rows(begin, end), positions.rows(begin, end)};
  }
};

uint64_t dropout_key(uint64_t seed, int64_t step);

// to = from where it is kept, scaled so that the mean stays, and 0 elsewhere; [T, channels].
void dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to);
// The way back: to += the same of `from`.
void add_dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to);

}  // namespace sb
