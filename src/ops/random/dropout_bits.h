#pragma once

#include "ops/random/philox.h"

namespace sb {

// Channels that one block of random bits decides, 16 bits each.
inline constexpr int kDropoutChannels = 8;

struct DropoutBits {
  PhiloxBlock block;
  SB_HOST_DEVICE uint32_t of(int channel) const { return (block.words[channel / 2] >> (channel % 2 * 16)) & 0xFFFF; }
};

// Of the channels from kDropoutChannels · `group` on.
SB_HOST_DEVICE inline DropoutBits dropout_bits(uint64_t key, uint32_t group, uint32_t position, uint32_t sequence,
                                               uint32_t stream) {
  return {philox(key, group, position, sequence, stream)};
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
