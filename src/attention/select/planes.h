#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"

namespace sb {

// `score: planes` judges a key block by the largest product of the group's mean query with one of its keys, over a few
// channels: the rotary planes (channel i with i + d/2) that carry the most energy E[q²] · Var[k] in a layer and kv
// head. Which ones those are follows from earlier steps, never from the sequence at hand, so the selection stays
// causal.

// What one layer is judged by.
struct LayerPlanes {
  int kv_heads = 0, channels = 0;
  std::vector<int32_t> channel;  // [kv_heads, channels], ascending within a head
  std::vector<float> scale;      // [kv_heads], on products of the mean query: attention's own scale and a temperature
  // [kv_heads, channels]. Taken from every key it lowers all scores of a token alike: short floats tell them apart
  // then.
  std::vector<float> key_mean;

  std::span<const int32_t> of(int kv_head) const {
    return std::span(channel).subspan(static_cast<size_t>(kv_head) * static_cast<size_t>(channels),
                                      static_cast<size_t>(channels));
  }
  bool operator==(const LayerPlanes&) const = default;
};

// Sums over sampled tokens of one layer, [kv_heads, head_dim] each: they add up over micro-batches and ranks.
struct PlaneSums {
  double tokens = 0;                  // no whole number once older ones fade
  std::vector<double> query_squares;  // of the group's mean query
  std::vector<double> key_sums, key_squares;

  PlaneSums& operator+=(const PlaneSums& other);
  bool operator==(const PlaneSums&) const = default;
};

// Every so many tokens of a sequence one is sampled for the sums, from its first on: cheap, and the same whatever the
// packing.
inline constexpr int64_t kPlaneSampling = 16;

// The sums of one sequence on the CPU, the same for any number of threads. `q` [tokens, heads, d] and `k` [tokens,
// kv_heads, d] point to its first token. Of a shared sequence every rank measures the blocks it holds, one after the
// other: blocks are multiples of the sampling.
PlaneSums measure_planes(const Exec& exec, const AttentionShape& shape, const float* q, const float* k, int64_t tokens);

// The planes of the most energy; ties go to the lower plane.
LayerPlanes select_planes(const AttentionShape& shape, const PlaneSums& sums, int channels);

}  // namespace sb
