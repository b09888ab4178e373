#include "attention/select/kernels/plane_scores_kernels.h"

#include "attention/select/kernels/bf16_pairs.h"

namespace sb::SB_ISA {
namespace {

// Keys of a block that are multiplied at once; divides every length of a block. With two vectors of queries: 16 sums of
// 32 registers, or 8 of 16.
#if defined(SB_ISA_avx512)
constexpr int kKeys = 8;
#else
constexpr int kKeys = 4;
#endif
constexpr int kPanel = 2 * kLanes;  // queries

// The largest product of every query of a panel [depth, kPanel] with a key of a block [depth, block]. Products that are
// no number do not count.
void largest_keys(const float* keys, int block, const float* queries, int64_t depth, float* out) {
  Vf first_top = splat(-__builtin_inff()), second_top = first_top;
  for (int key = 0; key < block; key += kKeys) {
    Vf sum[kKeys][2];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) sum[i][0] = sum[i][1] = zero();
    for (int64_t c = 0; c < depth; ++c) {
      const Vf first = load(queries + c * kPanel), second = load(queries + c * kPanel + kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        const Vf one = splat(keys[c * block + key + i]);
        sum[i][0] = fma(one, first, sum[i][0]);
        sum[i][1] = fma(one, second, sum[i][1]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
      first_top = max(sum[i][0], first_top);
      second_top = max(sum[i][1], second_top);
    }
  }
  store(out, first_top);
  store(out + kLanes, second_top);
}

#if defined(SB_ISA_avx512)
// The same where every number is a pair of bf16.
SB_TARGET_BF16 void largest_paired_keys(const float* keys, int block, const float* queries, int64_t depth, float* out) {
  __m512 first_top = _mm512_set1_ps(-__builtin_inff()), second_top = first_top;
  for (int key = 0; key < block; key += kKeys) {
    __m512 sum[kKeys][2];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t c = 0; c < depth; ++c) {
      const auto first = reinterpret_cast<__m512bh>(_mm512_loadu_ps(queries + c * kPanel));
      const auto second = reinterpret_cast<__m512bh>(_mm512_loadu_ps(queries + c * kPanel + kLanes));
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        const auto one = reinterpret_cast<__m512bh>(_mm512_set1_ps(keys[c * block + key + i]));
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], one, first);
        sum[i][1] = _mm512_dpbf16_ps(sum[i][1], one, second);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
      first_top = _mm512_max_ps(sum[i][0], first_top);
      second_top = _mm512_max_ps(sum[i][1], second_top);
    }
  }
  _mm512_storeu_ps(out, first_top);
  _mm512_storeu_ps(out + kLanes, second_top);
}
#endif

// Pairs [depth, columns] → numbers [2 · depth, columns]; whole vectors.
void unpack(const float* pairs, int64_t depth, int64_t columns, float* x) {
  for (int64_t c = 0; c < depth; ++c) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      const Vf pair = load(pairs + c * columns + i);
      store(x + 2 * c * columns + i, first_of(pair));
      store(x + (2 * c + 1) * columns + i, second_of(pair));
    }
  }
}

int64_t panels_of(int64_t rows) {
  return (rows + kPanel - 1) / kPanel;
}

// How products are taken: of pairs as they lie, or of the numbers in them.
struct Products {
  void (*largest)(const float*, int, const float*, int64_t, float*);
  bool paired;
  Products() : largest(largest_keys), paired(false) {
#if defined(SB_ISA_avx512)
    if (has_bf16_products()) largest = largest_paired_keys, paired = true;
#endif
  }
  int64_t depth(int64_t channels) const {
    return paired ? channels / 2 : channels;
  }
};

// Queries [rows, channels] from `row` on, channel by channel, rounded: [depth, kPanel]; zeros where there are none.
void fill_panel(const Products& products, const float* queries, int64_t rows, int64_t row, int64_t channels,
                float* fresh, float* panel) {
  for (int64_t r = 0; r < kPanel; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      fresh[c * kPanel + r] = row + r < rows ? queries[(row + r) * channels + c] : 0.0f;
    }
  }
  if (products.paired) return make_pairs(fresh, channels, kPanel, panel);
  float pairs[kPanel];
  for (int64_t c = 0; c < channels; c += 2) {
    make_pairs(fresh + c * kPanel, 2, kPanel, pairs);
    unpack(pairs, 1, kPanel, panel + c * kPanel);
  }
}

}  // namespace

void pack_plane_keys(const float* keys, int64_t channels, int64_t count, float* pairs) {
  make_pairs(keys, channels, count, pairs);
}

int64_t plane_scratch_floats(int64_t rows, int block, int64_t channels) {
  // All panels, one before it is rounded, the numbers of a block.
  return (panels_of(rows) + 1) * kPanel * channels + block * channels;
}

void score_planes(const float* keys, int64_t blocks, int block, int64_t channels, const float* queries, int64_t rows,
                  float* scores, float* scratch) {
  const Products products;
  const int64_t panels = panels_of(rows), depth = products.depth(channels);
  float* const fresh = scratch + panels * kPanel * channels;
  float* const numbers = fresh + kPanel * channels;
  for (int64_t panel = 0; panel < panels; ++panel) {
    fill_panel(products, queries, rows, panel * kPanel, channels, fresh, scratch + panel * kPanel * depth);
  }
  for (int64_t j = 0; j < blocks; ++j) {
    const float* block_keys = keys + j * block * (channels / 2);
    if (!products.paired) {
      unpack(block_keys, channels / 2, block, numbers);
      block_keys = numbers;
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      float largest[kPanel];
      products.largest(block_keys, block, scratch + panel * kPanel * depth, depth, largest);
      for (int64_t r = 0; r < kPanel && panel * kPanel + r < rows; ++r) {
        scores[(panel * kPanel + r) * blocks + j] = largest[r];
      }
    }
  }
}

}  // namespace sb::SB_ISA
