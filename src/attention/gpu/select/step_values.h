#pragma once

// What the host tells selection in every step, and what it is told of it in return. Nothing here waits for the device
// or for the host.

#include <cstdint>
#include <span>

#include "attention/gpu/launch/params.h"

namespace sb::gpu {

// 32-bit words to the device, as parameters of a kernel: few of them, from memory that may change right after.
void put_words(uint32_t* to, std::span<const uint32_t> words, void* stream);

// After a selection: the (query, key) pairs of all sequences are added to `pairs`, their blocks to those of the
// classes. `selected` as SelectParams has it, `classes` of every sequence.
void add_counts(unsigned long long* pairs, unsigned long long* blocks, const unsigned long long* selected,
                const int32_t* classes, int32_t sequences, void* stream);

// After a selection: of every sequence named, its blocks beyond `given` and `wanted` to counts[2 · place] and the next.
struct SequenceBlocks {
  int32_t sequence = 0, place = 0;
  int64_t given = 0, wanted = 0;
};
void write_counts(int64_t* counts, const unsigned long long* selected, std::span<const SequenceBlocks> sequences,
                  void* stream);

// Energies of channels for the selection of planes (PlaneSums), added in a fixed order.
struct PlaneSumsParams {
  Shape shape;
  const void* q = nullptr;
  const void* k = nullptr;
  const int32_t* samples = nullptr;  // tokens
  int32_t sample_count = 0;
  double* partial = nullptr;  // workspace: [plane_sums_partials()]
  double* sums = nullptr;     // [query squares, key sums, key squares][kv_heads, head_dim]
};
constexpr int kPlanePieceSamples = 16;
constexpr int64_t plane_sums_partials(int64_t samples, int64_t kv_heads, int64_t head_dim) {
  return (samples + kPlanePieceSamples - 1) / kPlanePieceSamples * 3 * kv_heads * head_dim;
}
void add_plane_sums(const PlaneSumsParams& params, Precision precision, void* stream);

}  // namespace sb::gpu
