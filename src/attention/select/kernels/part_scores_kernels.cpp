#include "attention/select/kernels/part_scores_kernels.h"

#include "attention/select/kernels/bf16_pairs.h"

namespace sb::SB_ISA {
namespace {

#if defined(SB_ISA_avx512)
constexpr int kMaxParts = 14;  // 28 accumulators, 2 vectors of queries, 1 broadcast: 31 of 32 registers
#else
constexpr int kMaxParts = 6;  // 12 + 2 + 1 of 16
#endif
constexpr int kPanel = 2 * kLanes;  // queries

// Of sums of exponentials whose largest is one: 1 ≤ x, finite. Relative error about one rounding (polynomial of Cephes'
// logf).
Vf log_of_sum(Vf x) {
  using Vi = int32_t __attribute__((vector_size(sizeof(Vf))));
  // x = m · 2^e with m in [√½, √2).
  const Vi bits = reinterpret_cast<Vi>(x), shifted = bits - 0x3f3504f3;
  const Vi exponent = shifted >> 23;
  const Vf m = reinterpret_cast<Vf>((shifted & 0x007fffff) + 0x3f3504f3) - splat(1.0f);
  const Vf e = __builtin_convertvector(exponent, Vf);
  static constexpr float kPolynomial[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                          -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  Vf p = splat(7.0376836292e-2f);
  for (const float c : kPolynomial) p = fma(p, m, splat(c));
  const Vf square = m * m;
  p = fma(p * square, m, e * splat(-2.12194440e-4f));
  return fma(e, splat(0.693359375f), m + fnma(splat(0.5f), square, p));
}

// C[Parts][kPanel] = parts · queries over `depth` channels. Parts of neighbouring channels lie `stride` apart.
template <int Parts>
void multiply(const float* parts, int64_t stride, const float* queries, int64_t depth, float* out) {
  Vf sum[Parts][2];
#pragma GCC unroll 16
  for (int i = 0; i < Parts; ++i) sum[i][0] = sum[i][1] = zero();
  for (int64_t c = 0; c < depth; ++c) {
    const Vf first = load(queries), second = load(queries + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Parts; ++i) {
      const Vf part = splat(parts[i]);
      sum[i][0] = fma(part, first, sum[i][0]);
      sum[i][1] = fma(part, second, sum[i][1]);
    }
    parts += stride;
    queries += kPanel;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Parts; ++i) {
    store(out + i * kPanel, sum[i][0]);
    store(out + i * kPanel + kLanes, sum[i][1]);
  }
}

using MultiplyFn = void (*)(const float*, int64_t, const float*, int64_t, float*);

template <int Parts = kMaxParts>
MultiplyFn multiply_for(int parts) {
  if constexpr (Parts > 1) {
    if (parts < Parts) return multiply_for<Parts - 1>(parts);
  }
  return &multiply<Parts>;
}

#if defined(SB_ISA_avx512)
// The same where every number is a pair of bf16: two neighbouring channels.
template <int Parts>
SB_TARGET_BF16 void multiply_pairs(const float* parts, int64_t stride, const float* queries, int64_t depth,
                                   float* out) {
  __m512 sum[Parts][2];
#pragma GCC unroll 16
  for (int i = 0; i < Parts; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  for (int64_t c = 0; c < depth; ++c) {
    const auto first = reinterpret_cast<__m512bh>(_mm512_loadu_ps(queries));
    const auto second = reinterpret_cast<__m512bh>(_mm512_loadu_ps(queries + kLanes));
#pragma GCC unroll 16
    for (int i = 0; i < Parts; ++i) {
      const auto part = reinterpret_cast<__m512bh>(_mm512_set1_ps(parts[i]));
      sum[i][0] = _mm512_dpbf16_ps(sum[i][0], part, first);
      sum[i][1] = _mm512_dpbf16_ps(sum[i][1], part, second);
    }
    parts += stride;
    queries += kPanel;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Parts; ++i) {
    _mm512_storeu_ps(out + i * kPanel, sum[i][0]);
    _mm512_storeu_ps(out + i * kPanel + kLanes, sum[i][1]);
  }
}

template <int Parts = kMaxParts>
MultiplyFn multiply_pairs_for(int parts) {
  if constexpr (Parts > 1) {
    if (parts < Parts) return multiply_pairs_for<Parts - 1>(parts);
  }
  return &multiply_pairs<Parts>;
}
#endif

// log Σ exp over the parts, for a panel of queries.
void fold(const float* scores, int parts, float* out) {
  for (int v = 0; v < kPanel; v += kLanes) {
    Vf top = load(scores + v);
    for (int p = 1; p < parts; ++p) top = max(top, load(scores + p * kPanel + v));
    Vf sum = zero();
    for (int p = 0; p < parts; ++p) sum = sum + exp_nonpositive(load(scores + p * kPanel + v) - top);
    store(out + v, top + log_of_sum(sum));
  }
}

int64_t panels_of(int64_t rows) {
  return (rows + kPanel - 1) / kPanel;
}

// Queries [rows, width] from `row` on, channel by channel: [width, kPanel]; zeros where there are none.
void transpose_panel(const float* queries, int64_t rows, int64_t row, int64_t width, float* panel) {
  for (int64_t r = 0; r < kPanel; ++r) {
    for (int64_t c = 0; c < width; ++c) panel[c * kPanel + r] = row + r < rows ? queries[(row + r) * width + c] : 0.0f;
  }
}

struct Products {
  MultiplyFn (*multiply_of)(int parts);
  int64_t depth;  // numbers (or pairs) that a part and a query have
};

}  // namespace

int64_t part_scratch_floats(int64_t rows, int parts, int64_t width) {
  // All panels and one before it is rounded, scores of a block for a panel, the rounded statistics of a block.
  return (panels_of(rows) + 1) * kPanel * width + int64_t{parts} * kPanel + int64_t{parts} * ((width + 1) / 2);
}

void score_parts(const float* statistics, int64_t blocks, int parts, int64_t width, const float* queries, int64_t rows,
                 float* scores, float* scratch) {
  const int64_t panels = panels_of(rows);
  float* const panel_queries = scratch;
  float* const fresh = panel_queries + panels * kPanel * width;
  float* const part_scores = fresh + kPanel * width;
  Products products{multiply_for<kMaxParts>, width};
#if defined(SB_ISA_avx512)
  float* const rounded = part_scores + int64_t{parts} * kPanel;
  const bool pairs = has_bf16_products();
  if (pairs) products = {multiply_pairs_for<kMaxParts>, (width + 1) / 2};
#endif
  const int64_t panel_floats = kPanel * products.depth;
  for (int64_t panel = 0; panel < panels; ++panel) {
    float* out = panel_queries + panel * panel_floats;
#if defined(SB_ISA_avx512)
    if (pairs) {
      transpose_panel(queries, rows, panel * kPanel, width, fresh);
      make_pairs(fresh, width, kPanel, out);
      continue;
    }
#endif
    transpose_panel(queries, rows, panel * kPanel, width, out);
  }

  const int chunks = (parts + kMaxParts - 1) / kMaxParts;
  for (int64_t block = 0; block < blocks; ++block) {
    const float* part_rows = statistics + block * parts * width;
#if defined(SB_ISA_avx512)
    if (pairs) {
      make_pairs(part_rows, width, parts, rounded);
      part_rows = rounded;
    }
#endif
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int chunk = 0, part = 0; chunk < chunks; ++chunk) {  // of nearly equal size
        const int count = (parts - part + chunks - chunk - 1) / (chunks - chunk);
        products.multiply_of(count)(part_rows + part, parts, panel_queries + panel * panel_floats, products.depth,
                                    part_scores + part * kPanel);
        part += count;
      }
      float folded[kPanel];
      fold(part_scores, parts, folded);
      for (int64_t r = 0; r < kPanel && panel * kPanel + r < rows; ++r) {
        scores[(panel * kPanel + r) * blocks + block] = folded[r];
      }
    }
  }
}

}  // namespace sb::SB_ISA
