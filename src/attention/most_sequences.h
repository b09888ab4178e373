#pragma once

#include <cstdint>

namespace sb {

// No micro-batch of at most so many tokens has more sequences: each takes whole tiles and blocks, and this is what
// memory is planned for.
constexpr int64_t most_packed_sequences(int64_t tokens) {
  return tokens / 64 + 64;
}

}  // namespace sb
