#pragma once

#include <cstdint>

// Shared by both devices, so that both drop the same elements.
#ifdef __CUDACC__
#define SB_HOST_DEVICE __host__ __device__
#else
#define SB_HOST_DEVICE
#endif

namespace sb {

// Channels that one block of random bits decides, 16 bits each.
inline constexpr int kDropoutChannels = 8;

struct DropoutBits {
  uint32_t words[4];
  SB_HOST_DEVICE uint32_t of(int channel) const { return (words[channel / 2] >> (channel % 2 * 16)) & 0xFFFF; }
};

// Philox4x32-10, as Random::block of core/random.h, of the channels from kDropoutChannels · `group` on.
SB_HOST_DEVICE inline DropoutBits dropout_bits(uint64_t key, uint32_t group, uint32_t position, uint32_t sequence,
                                               uint32_t stream) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = group, c1 = position, c2 = sequence, c3 = stream;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// An element is dropped where its bits are below this.
inline uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(probability * 65536.0 + 0.5);
}

// What is kept is multiplied with this.
inline float dropout_scale(double probability) {
  return static_cast<float>(65536.0 / (65536.0 - dropout_threshold(probability)));
}

}  // namespace sb
