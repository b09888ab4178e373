#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/select/planes.h"

namespace sb {

// The planes of a layer as words: channels [kv_heads, channels], then scales [kv_heads], then means of keys [kv_heads,
// channels], the latter two as the bits of floats.
std::vector<uint32_t> plane_words(const LayerPlanes& planes);
constexpr int64_t plane_word_count(int64_t kv_heads, int64_t channels) {
  return kv_heads * (2 * channels + 1);
}
// The way back; UserError for words that are none.
LayerPlanes planes_of(std::span<const uint32_t> words, const AttentionShape& shape, int channels);

// What a caller who learns by itself gives to a forward on the device in place of SelectingAttention::use(), and where
// that leaves what take_observations() would tell. What is given is host memory, of which nothing is needed after the
// call; what is seen is device memory.
struct GivenSelection {
  std::span<const uint32_t> planes;    // score `planes`: plane_words() of the layer at hand
  std::span<const float> corrections;  // `mass`: of every sequence, to start_threshold()
  // `mass`: of sequence i, counts[2 · places[i]] are the blocks selected and the next the blocks wanted (MassCounts).
  int64_t* counts = nullptr;
  std::span<const int32_t> places;
  // Score `planes`: tokens sampled, then query squares, key sums and key squares, [kv_heads, head_dim] each.
  double* sums = nullptr;
};

}  // namespace sb
