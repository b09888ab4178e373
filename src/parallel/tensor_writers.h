#pragma once

#include <cstdint>
#include <vector>

#include "parallel/grid.h"
#include "parallel/model_layout.h"

namespace sb {

// Which rank writes which tensors of a checkpoint. Weights and moments are whole there, whatever the layout, so that
// any other finds its part; each is written by one of the ranks that share its stage, which have about as many bytes to
// write each. A pure function of its arguments: the same on all ranks.
class TensorWriters {
 public:
  enum class Kind { weight, first_moment, second_moment };
  struct Item {
    const ModelLayout::Tensor* tensor;  // of the layout, which outlives this
    Kind kind;
  };
  // `weights_on_first_rank`: in one file, which adapters have to be.
  TensorWriters(const ModelLayout& layout, const GridShape& grid, bool weights_on_first_rank);

  // What a rank writes: weights, first moments, second moments.
  const std::vector<Item>& of(int rank) const { return items_[static_cast<size_t>(rank)]; }
  int64_t elements(int rank) const;
  // The most items of a rank.
  size_t rounds() const;
  // Ranks that write weights (or moments), and which of them this one is, counted from 1; 0: it writes none.
  struct File {
    int number = 0, count = 0;
  };
  File weights_file(int rank) const { return file(rank, true); }
  File moments_file(int rank) const { return file(rank, false); }

 private:
  File file(int rank, bool of_weights) const;

  std::vector<std::vector<Item>> items_;  // by rank
};

}  // namespace sb
