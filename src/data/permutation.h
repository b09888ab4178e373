#pragma once

#include <bit>
#include <cstdint>

#include "core/random.h"

namespace sb {

// A pseudo-random order of 0 .. count-1 without a table: a Feistel network over the smallest power of two that holds
// `count`, walked along its cycle until it lands inside (fewer than two steps on average). Its whole state is (seed,
// stream), so that any place of any epoch's order can be computed on its own.
class IndexPermutation {
 public:
  // `stream` separates orders under one seed (files, epochs).
  IndexPermutation(uint64_t count, uint64_t seed, uint64_t stream)
      : count_(count),
        seed_(seed),
        stream_(stream),
        low_bits_((count > 1 ? std::bit_width(count - 1) : 0) - high_bits(count)),
        low_mask_((uint64_t{1} << low_bits_) - 1),
        high_mask_((uint64_t{1} << high_bits(count)) - 1) {}

  uint64_t at(uint64_t index) const {
    if (count_ < 2) return index;
    do index = step(index);
    while (index >= count_);
    return index;
  }

 private:
  static constexpr int kRounds = 8;
  static int high_bits(uint64_t count) { return count > 1 ? std::bit_width(count - 1) / 2 : 0; }

  uint64_t round(int number, uint64_t half) const {
    const auto bits = Random::block(seed_, half, stream_ << 4 | static_cast<uint64_t>(number));
    return static_cast<uint64_t>(bits[0]) << 32 | bits[1];
  }
  uint64_t step(uint64_t index) const {
    uint64_t low = index & low_mask_, high = index >> low_bits_;
    for (int r = 0; r < kRounds; r += 2) {
      low ^= round(r, high) & low_mask_;
      high ^= round(r + 1, low) & high_mask_;
    }
    return high << low_bits_ | low;
  }

  uint64_t count_, seed_, stream_;
  int low_bits_;
  uint64_t low_mask_, high_mask_;
};

}  // namespace sb
