#pragma once

#include "device/exec.h"
#include "model/tensor_parallel/shared_rows.h"

namespace sb {

// Products of which every rank has a part, on their way to the residual stream: the sum over the ranks of one piece
// travels while the next piece is multiplied.
class RowSums {
 public:
  RowSums(const Exec& exec, const SharedRows& rows, Arena& workspace, DType dtype, int64_t tokens, int64_t columns);

  // Where this rank's part of a piece's product goes: all of its tokens.
  TensorView place(const SharedRows::Piece& piece) const;
  // y = residual + the sum of the parts, of this rank's rows; they are there after the next piece's add, or finish().
  void add(const SharedRows::Piece& piece, TensorView residual, TensorView y);
  void finish();

 private:
  struct UnderWay {
    CommRequest travel;
    TensorView sum, residual, y;
  };

  const Exec& exec_;
  const SharedRows& rows_;
  SharedRows::Rooms rooms_;
  size_t room_ = 0;
  UnderWay under_way_;
};

}  // namespace sb
