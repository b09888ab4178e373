#include <algorithm>

#include "ops/backends.h"
#include "ops/cpu/pieces.h"
#include "ops/random/dropout_bits.h"

namespace sb::cpu {

void dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to, bool add) {
  const int64_t width = from.dim(1);
  const uint32_t threshold = dropout_threshold(rows.probability);
  const float scale = dropout_scale(rows.probability);
  const int32_t *sequences = rows.sequences.as<int32_t>(), *positions = rows.positions.as<int32_t>();
  exec.pool->parallel_for(from.dim(0), rows_per_piece(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = from.f32() + row * width;
      float* y = to.f32() + row * width;
      for (int64_t first = 0; first < width;) {
        const int64_t channel = rows.first_channel + first;
        const auto skipped = static_cast<int>(channel % kDropoutChannels);
        const DropoutBits bits =
            dropout_bits(rows.key, static_cast<uint32_t>(channel / kDropoutChannels),
                         static_cast<uint32_t>(positions[row]), static_cast<uint32_t>(sequences[row]), rows.stream);
        const auto count = static_cast<int>(std::min<int64_t>(kDropoutChannels - skipped, width - first));
        for (int c = 0; c < count; ++c) {
          const float kept = bits.of(skipped + c) < threshold ? 0.0f : scale * x[first + c];
          y[first + c] = add ? y[first + c] + kept : kept;
        }
        first += count;
      }
    }
  });
}

}  // namespace sb::cpu
