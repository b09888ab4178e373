#include "core/files/crc32c.h"

#include <nmmintrin.h>

#include <cstring>

namespace sb {

__attribute__((target("sse4.2"))) uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  uint64_t state = ~crc;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    uint64_t word;
    std::memcpy(&word, next, 8);
    state = _mm_crc32_u64(state, word);
  }
  auto narrow = static_cast<uint32_t>(state);
  for (; bytes > 0; --bytes, ++next) narrow = _mm_crc32_u8(narrow, *next);
  return ~narrow;
}

}  // namespace sb
