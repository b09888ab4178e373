#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace sb {

// Philox4x32-10 (Salmon et al., SC'11): a pure function from (key, counter) to 128 random bits. Its whole state is the
// position, so that any rank can produce any number and a resumed run needs two integers.
class Random {
 public:
  // `stream` separates uses (shuffling, initialisation, sampling) under one seed.
  explicit Random(uint64_t seed, uint64_t stream = 0, uint64_t position = 0)
      : seed_(seed), stream_(stream), position_(position) {}

  static std::array<uint32_t, 4> block(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                                 static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)};
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
      c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return c;
  }

  // The number at a position, without moving.
  uint32_t bits_at(uint64_t position) const { return block(seed_, position / 4, stream_)[position % 4]; }

  uint32_t next_u32() { return bits_at(position_++); }
  uint64_t next_u64() {
    const uint64_t high = next_u32();
    return high << 32 | next_u32();
  }
  // Uniform in [0, 1).
  double uniform() { return static_cast<double>(next_u64() >> 11) * 0x1p-53; }
  // Uniform in [0, bound), without bias.
  uint64_t below(uint64_t bound) {
    const uint64_t limit = UINT64_MAX - UINT64_MAX % bound;
    uint64_t value = next_u64();
    while (value >= limit) value = next_u64();
    return value % bound;
  }
  // Standard normal (Box–Muller; two draws a call, so that a position is enough to resume).
  double normal() {
    const double u = 1.0 - uniform(), v = uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

  uint64_t position() const { return position_; }

 private:
  uint64_t seed_, stream_, position_;
};

}  // namespace sb
