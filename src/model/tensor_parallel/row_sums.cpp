#include "model/tensor_parallel/row_sums.h"

#include <utility>

#include "ops/linear.h"

namespace sb {

RowSums::RowSums(const Exec& exec, const SharedRows& rows, Arena& workspace, DType dtype, int64_t tokens,
                 int64_t columns)
    : exec_(exec), rows_(rows), rooms_(rows.allocate_rooms(workspace, dtype, tokens, columns)) {}

TensorView RowSums::place(const SharedRows::Piece& piece) const {
  return SharedRows::tokens(rooms_[room_], piece);
}

void RowSums::add(const SharedRows::Piece& piece, TensorView residual, TensorView y) {
  const TensorView all = rows_.part(rooms_[room_], piece);
  UnderWay now{rows_.reduce_scatter(all), rows_.own(all, piece), residual, y};
  finish();
  under_way_ = std::move(now);
  room_ = 1 - room_;
}

void RowSums::finish() {
  if (under_way_.y.empty()) return;
  under_way_.travel.wait();
  ::sb::add(exec_, under_way_.residual, under_way_.sum, under_way_.y);
  under_way_.y = {};
}

}  // namespace sb
