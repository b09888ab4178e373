#include "attention/gpu/plan/given_selection.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/errors.h"

namespace sb {

std::vector<uint32_t> plane_words(const LayerPlanes& planes) {
  std::vector<uint32_t> words(planes.channel.begin(), planes.channel.end());
  for (const std::vector<float>* floats : {&planes.scale, &planes.key_mean})
    for (const float value : *floats) words.push_back(std::bit_cast<uint32_t>(value));
  return words;
}

LayerPlanes planes_of(std::span<const uint32_t> words, const AttentionShape& shape, int channels) {
  const auto kv_heads = static_cast<size_t>(shape.kv_heads), listed = kv_heads * static_cast<size_t>(channels);
  SB_USER_CHECK(
      std::ssize(words) == plane_word_count(shape.kv_heads, channels),
      "planes: {} numbers where {} kv heads of {} channels have {}; score `planes` needs those of earlier steps",
      words.size(), shape.kv_heads, channels, plane_word_count(shape.kv_heads, channels));
  LayerPlanes planes{shape.kv_heads, channels, {}, {}, {}};
  planes.channel.assign(words.begin(), words.begin() + static_cast<int64_t>(listed));
  for (const uint32_t word : words.subspan(listed, kv_heads)) planes.scale.push_back(std::bit_cast<float>(word));
  for (const uint32_t word : words.subspan(listed + kv_heads)) planes.key_mean.push_back(std::bit_cast<float>(word));
  const auto finite = [](float value) { return std::isfinite(value); };
  SB_USER_CHECK(std::ranges::all_of(planes.channel, [&](int32_t c) { return c >= 0 && c < shape.head_dim; }) &&
                    std::ranges::all_of(planes.scale, finite) && std::ranges::all_of(planes.key_mean, finite),
                "planes: these are not the planes of a layer with heads of {}", shape.head_dim);
  return planes;
}

}  // namespace sb
