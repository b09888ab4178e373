#pragma once

#include <bit>

#include "ops/random/philox.h"

// How AdamW's moments become bf16. A step changes the second one by 1 - beta2, often less than half a unit in the last
// place of bf16: rounded to the nearest it would never move. Rounded up with a probability that is the distance to the
// lower neighbour, it is right on average.

namespace sb {

// The elements of a range as elements of the tensor that they are a part of. Rounding goes by these, so that it depends
// neither on threads nor on which rank has the element.
struct MomentPlace {
  uint64_t tensor = 0;  // a number of its own for every tensor of the model
  int64_t first = 0;    // the range's first element, counted in the rank's part of the tensor
  // Element j of the part is element begin + j / run · stride + j % run of the tensor: parts of columns have runs.
  int64_t begin = 0, run = 1, stride = 1;

  // Of the range's element i.
  SB_HOST_DEVICE int64_t of(int64_t i) const {
    const int64_t j = first + i;
    return run == stride ? begin + j : begin + j / run * stride + j % run;
  }
};

// The random bits of one step for the elements of one tensor: the lower half of a word is for the first moment, the
// upper half for the second. Four neighbours share a block, which is kept for the next call.
class MomentBits {
 public:
  SB_HOST_DEVICE MomentBits(uint64_t tensor, int64_t step) : tensor_(tensor), step_(static_cast<uint64_t>(step)) {}

  SB_HOST_DEVICE uint32_t at(int64_t place) {
    const auto group = static_cast<uint64_t>(place) / 4;
    if (group != group_) {
      group_ = group;
      block_ = philox(tensor_, static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                      static_cast<uint32_t>(step_), static_cast<uint32_t>(step_ >> 32));
    }
    // Choices instead of an index keep the block in a kernel's registers.
    const uint32_t low = place & 1 ? block_.words[1] : block_.words[0],
                   high = place & 1 ? block_.words[3] : block_.words[2];
    return place & 2 ? high : low;
  }

 private:
  uint64_t tensor_, step_;
  uint64_t group_ = ~uint64_t{0};
  PhiloxBlock block_ = {};
};

// One of the two neighbours in bf16, the upper (in magnitude) where the 16 bits that go and `random` (below 2^16)
// carry: the mean over all of these is x. What bf16 holds stays, and so do NaN and infinity, which nothing finite
// becomes.
SB_HOST_DEVICE inline float round_moment(float x, uint32_t random) {
  constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & kMagnitude) > kInfinity) return x;
  const uint32_t up = bits + random;
  return std::bit_cast<float>(((up & kMagnitude) < kInfinity ? up : bits) & 0xffff0000);
}

}  // namespace sb
