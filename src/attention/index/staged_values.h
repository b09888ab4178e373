#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace sb {

// Values that threads append, each to a line of its own. Lines are made of pieces of one size, which are shared out
// anew each time: what all hold together follows from the number of values, whichever thread brings them.
template <typename T>
class StagedValues {
 public:
  static constexpr int64_t kPiece = 4096;

  // Empty lines. Memory is kept.
  void begin(int threads) {
    for (Line& line : lines_) {
      for (std::unique_ptr<T[]>& piece : line.pieces) free_.push_back(std::move(piece));
      line = {};
    }
    lines_.resize(threads);
  }
  int threads() const { return static_cast<int>(lines_.size()); }
  // Where they begin in the thread's line. Different threads may call it at the same time.
  int64_t append(int thread, std::span<const T> values) {
    Line& line = lines_[thread];
    const int64_t begin = line.size;
    while (!values.empty()) {
      const int64_t at = line.size % kPiece;
      if (at == 0) line.pieces.push_back(take());
      const auto count = static_cast<size_t>(std::min<int64_t>(std::ssize(values), kPiece - at));
      std::copy_n(values.begin(), count, line.pieces.back().get() + at);
      line.size += static_cast<int64_t>(count);
      values = values.subspan(count);
    }
    return begin;
  }
  // Gives `visit` the values in order, in parts.
  template <typename Visit>
  void read(int thread, int64_t begin, int64_t count, const Visit& visit) const {
    for (const int64_t end = begin + count; begin < end;) {
      const int64_t at = begin % kPiece, part = std::min(end - begin, kPiece - at);
      visit(std::span<const T>(lines_[thread].pieces[begin / kPiece].get() + at, static_cast<size_t>(part)));
      begin += part;
    }
  }

  int64_t bytes() const { return pieces_ * piece_bytes(); }
  // That is never more.
  static int64_t most_bytes(int64_t values, int threads) {
    return values == 0 ? 0 : (values / kPiece + threads) * piece_bytes();
  }

 private:
  struct Line {
    std::vector<std::unique_ptr<T[]>> pieces;
    int64_t size = 0;
  };
  static int64_t piece_bytes() { return kPiece * static_cast<int64_t>(sizeof(T)); }
  std::unique_ptr<T[]> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      ++pieces_;
      return std::make_unique_for_overwrite<T[]>(kPiece);
    }
    std::unique_ptr<T[]> piece = std::move(free_.back());
    free_.pop_back();
    return piece;
  }

  std::vector<Line> lines_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<T[]>> free_;
  int64_t pieces_ = 0;
};

}  // namespace sb
