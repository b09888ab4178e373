#pragma once

#include "core/arena.h"
#include "model/tensor_parallel/tensor_group.h"

namespace sb {

// The rows of a micro-batch, piece by piece, as products need them (those of all ranks) and as norms and the residual
// stream have them (this rank's own). Where nobody shares the products both are the same, and nothing is moved.
class SharedRows {
 public:
  // `group`: nobody where it is null.
  SharedRows(TensorGroup* group, int64_t chunk)
      : group_(group), shares_(group ? group->share() : TensorShare(), chunk) {}

  bool shared() const { return group_ != nullptr; }
  const TokenShares& shares() const { return shares_; }
  using Piece = TokenShares::Piece;

  // Room for the rows of all ranks, with their padding at the end.
  TensorView allocate(Arena& arena, DType dtype, const Piece& piece, int64_t columns) const {
    return arena.allocate(dtype, {piece.rows * shares_.share().ranks, columns});
  }
  static TensorView tokens(TensorView all, const Piece& piece) { return all.rows(0, piece.tokens()); }
  // This rank's rows there.
  TensorView own(TensorView all, const Piece& piece) const {
    const int64_t begin = shares_.share().rank * piece.rows;
    return all.rows(begin, begin + piece.own());
  }
  // Afterwards `all` has the rows of all ranks where it had this rank's, ...
  void gather(const Exec& exec, TensorView all) const {
    if (group_) group_->gather(exec, all);
  }
  // ... or this rank's rows are the sum over all ranks and the others undefined.
  void reduce_scatter(const Exec& exec, TensorView all) const {
    if (group_) group_->reduce_scatter(exec, all);
  }

 private:
  TensorGroup* group_;
  TokenShares shares_;
};

}  // namespace sb
