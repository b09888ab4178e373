#pragma once

#include <array>
#include <utility>

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
    return arena.allocate(dtype, {all(piece), columns});
  }
  // The same for any piece of so many tokens, for each of those that are on their way or in use at once.
  using Rooms = std::array<TensorView, 2>;
  Rooms allocate_rooms(Arena& arena, DType dtype, int64_t tokens, int64_t columns) const {
    Rooms rooms;
    for (int64_t i = 0; i < shares_.rooms(tokens); ++i)
      rooms[static_cast<size_t>(i)] = arena.allocate(dtype, {shares_.padded_piece(tokens), columns});
    return rooms;
  }
  TensorView part(TensorView room, const Piece& piece) const { return room.rows(0, all(piece)); }
  static TensorView tokens(TensorView all, const Piece& piece) { return all.rows(0, piece.tokens()); }
  // This rank's rows there.
  TensorView own(TensorView all, const Piece& piece) const {
    const int64_t begin = shares_.share().rank * piece.rows;
    return all.rows(begin, begin + piece.own());
  }

  // Once it was waited for, `all` has the rows of all ranks where it had this rank's, ...
  CommRequest gather(TensorView all) const { return group_ ? group_->gather(all) : CommRequest(); }
  // ... or this rank's rows are the sum over all ranks and the others undefined.
  CommRequest reduce_scatter(TensorView all) const { return group_ ? group_->reduce_scatter(all) : CommRequest(); }

  // body(piece, begun) for every piece, `begun` being what begin(piece, room) gave. Where ranks share the rows, begin
  // of the next piece comes before the body of one, so that what it sends travels while the body computes; `room` says
  // which of two it may take. What either leaves in the workspace is released.
  template <typename Begin, typename Body>
  void each_piece_ahead(Arena& workspace, int64_t tokens, const Begin& begin, const Body& body) const {
    const int64_t pieces = shares_.pieces(tokens);
    if (!shared()) {
      for (int64_t i = 0; i < pieces; ++i) {
        ArenaScope scope(workspace);
        auto begun = begin(shares_.piece(tokens, i), 0);
        body(shares_.piece(tokens, i), begun);
      }
      return;
    }
    if (pieces == 0) return;
    auto next = begin(shares_.piece(tokens, 0), 0);
    for (int64_t i = 0; i < pieces; ++i) {
      auto now = std::move(next);
      if (i + 1 < pieces) next = begin(shares_.piece(tokens, i + 1), (i + 1) % 2);
      ArenaScope scope(workspace);
      body(shares_.piece(tokens, i), now);
    }
  }

 private:
  int64_t all(const Piece& piece) const { return piece.rows * shares_.share().ranks; }

  TensorGroup* group_;
  TokenShares shares_;
};

}  // namespace sb
