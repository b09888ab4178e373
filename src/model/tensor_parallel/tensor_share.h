#pragma once

#include <algorithm>
#include <cstdint>

namespace sb {

// What a rank of a tensor-parallel group has of a whole tensor: all of it, or a range of its rows or columns.
struct TensorCut {
  enum class Axis { none, rows, columns };
  Axis axis = Axis::none;
  int64_t whole = 0;           // rows or columns of the whole
  int64_t begin = 0, end = 0;  // of these
  // How many ranks have this very part, and which of them this one is. Each of several computes a part of the gradient.
  int copies = 1, copy = 0;
};

// One rank of a tensor-parallel group, which share the products of every layer and the vocabulary.
struct TensorShare {
  int ranks = 1, rank = 0;

  bool alone() const { return ranks == 1; }
  // This rank's part of `count` things: parts differ by one at most, and the first rank's is the largest.
  int64_t begin(int64_t count) const { return (count * rank + ranks - 1) / ranks; }
  int64_t end(int64_t count) const { return (count * (rank + 1) + ranks - 1) / ranks; }
  int64_t size(int64_t count) const { return end(count) - begin(count); }

  TensorCut whole() const { return {TensorCut::Axis::none, 0, 0, 0, ranks, rank}; }
  TensorCut rows(int64_t count) const { return cut(TensorCut::Axis::rows, count); }
  TensorCut columns(int64_t count) const { return cut(TensorCut::Axis::columns, count); }

 private:
  TensorCut cut(TensorCut::Axis axis, int64_t count) const {
    if (alone()) return {};
    return {axis, count, begin(count), end(count), 1, 0};
  }
};

// How a group shares the rows of a micro-batch, of which norms and the residual stream need no others: token by token
// in pieces of at most `chunk`, of each piece every rank equally many consecutive ones, but for the last ranks, which
// may have fewer where it does not divide. A rank's rows lie back to back.
class TokenShares {
 public:
  // Where ranks share rows there are several pieces, if they stay large enough for the products: the rows of one travel
  // while another is multiplied.
  static constexpr int64_t kPieces = 4, kLeastTokens = 2048;

  TokenShares(TensorShare share, int64_t chunk) : share_(share), chunk_(padded(chunk) * share.ranks) {}

  const TensorShare& share() const { return share_; }

  struct Piece {
    int64_t begin, end;          // tokens of the micro-batch
    int64_t rows;                // of a rank's part of it, padding included
    int64_t own_begin, own_end;  // this rank's part, among its own rows
    int64_t tokens() const { return end - begin; }
    int64_t own() const { return own_end - own_begin; }
  };
  // Tokens of every piece but the last. Grows with the tokens, and so does the number of pieces.
  int64_t piece_tokens(int64_t tokens) const {
    if (share_.alone()) return chunk_;
    const int64_t wanted = std::max(kLeastTokens, (tokens + kPieces - 1) / kPieces);
    return std::min(chunk_, padded(wanted) * share_.ranks);
  }
  int64_t pieces(int64_t tokens) const { return (tokens + piece_tokens(tokens) - 1) / piece_tokens(tokens); }
  Piece piece(int64_t tokens, int64_t number) const {
    const int64_t begin = number * piece_tokens(tokens);
    return piece_between(begin, std::min(tokens, begin + piece_tokens(tokens)));
  }
  template <typename Body>
  void each_piece(int64_t tokens, const Body& body) const {
    for (int64_t i = 0; i < pieces(tokens); ++i) body(piece(tokens, i));
  }
  // Rows that this rank has of so many tokens.
  int64_t own(int64_t tokens) const { return tokens == 0 ? 0 : piece(tokens, pieces(tokens) - 1).own_end; }
  // The same of the rank that has the most.
  int64_t most(int64_t tokens) const { return padded(tokens); }
  int64_t largest_piece(int64_t tokens) const { return std::min(tokens, piece_tokens(tokens)); }
  // Rows of that, of all ranks together, padding included.
  int64_t padded_piece(int64_t tokens) const { return padded(largest_piece(tokens)) * share_.ranks; }
  // Pieces whose rows are on their way or in use at once.
  int64_t rooms(int64_t tokens) const { return share_.alone() ? 0 : std::min<int64_t>(2, pieces(tokens)); }

 private:
  int64_t padded(int64_t tokens) const { return (tokens + share_.ranks - 1) / share_.ranks; }
  Piece piece_between(int64_t begin, int64_t end) const {
    const int64_t tokens = end - begin, rows = padded(tokens);
    const int64_t first = begin / share_.ranks;
    const int64_t own = std::clamp<int64_t>(tokens - share_.rank * rows, 0, rows);
    return {begin, end, rows, first, first + own};
  }

  TensorShare share_;
  int64_t chunk_;
};

}  // namespace sb
