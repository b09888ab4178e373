#include "attention/piece_operands.h"

#include <algorithm>

#include "device/memory.h"

namespace sb {

AttentionOperands keys_in_order(const Exec& exec, const PackedSequences& sequences, const AttentionOperands& operands) {
  if (!sequences.is_piece()) return operands;
  const std::span<const KeyPage> pages = sequences.piece.pages;
  const int64_t end = pages.back().begin + sequences.tokens(), first = pages.front().row;
  AttentionOperands seen = operands;
  if (std::ranges::all_of(pages, [&](const KeyPage& page) { return page.row == first + page.begin; })) {
    seen.k = operands.k.rows(first, first + end);
    seen.v = operands.v.rows(first, first + end);
    return seen;
  }
  const auto copied = [&](const TensorView& from) {
    const TensorView to = exec.scratch->allocate(from.dtype(), {end, from.dim(1), from.dim(2)});
    for (size_t i = 0; i < pages.size(); ++i) {
      const int64_t page_end = i + 1 < pages.size() ? pages[i + 1].begin : end, tokens = page_end - pages[i].begin;
      copy_tensor(exec, from.rows(pages[i].row, pages[i].row + tokens), to.rows(pages[i].begin, page_end));
    }
    return to;
  };
  seen.k = copied(operands.k);
  seen.v = copied(operands.v);
  return seen;
}

AttentionOperands own_keys(const PackedSequences& sequences, const AttentionOperands& operands) {
  if (!sequences.is_piece()) return operands;
  const int64_t row = sequences.piece.pages.back().row, end = row + sequences.tokens();
  AttentionOperands own = operands;
  own.k = operands.k.rows(row, end);
  own.v = operands.v.rows(row, end);
  return own;
}

}  // namespace sb
