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

namespace {

// Polynomials over bits modulo Castagnoli's, lowest power in the highest bit.
uint32_t multiplied(uint32_t a, uint32_t b) {
  constexpr uint32_t kPolynomial = 0x82f63b78;
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x to the power of 8 · bytes: what so many zero bytes do to a checksum.
uint32_t shift_by(uint64_t bytes) {
  uint32_t power = 1u << 30, result = 1u << 31;  // x and 1
  for (int i = 0; i < 3; ++i) power = multiplied(power, power);
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) result = multiplied(power, result);
    power = multiplied(power, power);
  }
  return result;
}

}  // namespace

uint32_t crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return multiplied(shift_by(second_bytes), first) ^ second;
}

}  // namespace sb
