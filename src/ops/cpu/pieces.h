#pragma once

#include <algorithm>
#include <cstdint>

namespace sb {

// Rows of `width` floats that one thread takes at a time: enough to outweigh handing them out, few enough to even out a
// disturbed core. What fits into one piece runs on the calling thread.
inline int64_t rows_per_piece(int64_t width) {
  constexpr int64_t kFloats = 1 << 14;
  return std::max<int64_t>(1, kFloats / std::max<int64_t>(1, width));
}

}  // namespace sb
