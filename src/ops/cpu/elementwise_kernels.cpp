#include "ops/cpu/isa_kernels.h"
#include "ops/cpu/simd.h"

namespace sb::SB_ISA {
namespace {

Vf sigmoid(Vf x) {
  return splat(1.0f) / (splat(1.0f) + exp(zero() - x));
}

}  // namespace

void swiglu_forward(const float* gate_up, int64_t rows, int64_t width, float* h) {
  for (int64_t t = 0; t < rows; ++t, gate_up += 2 * width, h += width) {
    for_vectors(width, [&](int64_t i, auto m) {
      const Vf g = load(gate_up + i, m), u = load(gate_up + width + i, m);
      store(h + i, m, g * sigmoid(g) * u);
    });
  }
}

void swiglu_backward(const float* gate_up, const float* dh, int64_t rows, int64_t width, float* dgate_up, float* h) {
  const Vf one = splat(1.0f);
  for (int64_t t = 0; t < rows; ++t, gate_up += 2 * width, dgate_up += 2 * width, dh += width) {
    for_vectors(width, [&](int64_t i, auto m) {
      const Vf g = load(gate_up + i, m), u = load(gate_up + width + i, m), d = load(dh + i, m);
      const Vf s = sigmoid(g);
      store(dgate_up + i, m, d * u * (s * fma(g, one - s, one)));
      store(dgate_up + width + i, m, d * (g * s));
      if (h != nullptr) store(h + t * width + i, m, g * s * u);
    });
  }
}

void adamw(const AdamWScalars& scalars, int64_t count, float* parameters, const float* gradients, float* m, float* v) {
  const Vf scale = splat(scalars.gradient_scale), b1 = splat(scalars.beta1), c1 = splat(scalars.one_minus_beta1);
  const Vf b2 = splat(scalars.beta2), c2 = splat(scalars.one_minus_beta2), decay = splat(scalars.decay);
  const Vf step = splat(scalars.step_size), root = splat(scalars.inverse_sqrt_correction2), eps = splat(scalars.eps);
  for_vectors(count, [&](int64_t i, auto mask) {
    const Vf g = load(gradients + i, mask) * scale;
    const Vf mi = fma(b1, load(m + i, mask), c1 * g);
    const Vf vi = fma(b2, load(v + i, mask), c2 * g * g);
    store(m + i, mask, mi);
    store(v + i, mask, vi);
    const Vf update = mi / fma(sqrt(vi), root, eps);
    store(parameters + i, mask, fnma(step, update, load(parameters + i, mask) * decay));
  });
}

double squared_sum(const float* x, int64_t count) {
  // Sixteen lanes of fp64 whatever the instruction set, so that the order of summation is the same.
  double lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += static_cast<double>(x[i + l]) * x[i + l];
  }
  for (int l = 0; i < count; ++i, ++l) lanes[l] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

void add(const float* x, int64_t count, float* y) {
  for_vectors(count, [&](int64_t i, auto m) { store(y + i, m, load(y + i, m) + load(x + i, m)); });
}

void column_sums(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sums) {
  constexpr int kTile = 4 * kLanes;  // columns held in registers over all rows
  int64_t c = 0;
  for (; c + kTile <= columns; c += kTile) {
    Vf s0 = load(sums + c), s1 = load(sums + c + kLanes);
    Vf s2 = load(sums + c + 2 * kLanes), s3 = load(sums + c + 3 * kLanes);
    for (int64_t t = 0; t < rows; ++t) {
      const float* row = x + t * stride + c;
      s0 += load(row);
      s1 += load(row + kLanes);
      s2 += load(row + 2 * kLanes);
      s3 += load(row + 3 * kLanes);
    }
    store(sums + c, s0);
    store(sums + c + kLanes, s1);
    store(sums + c + 2 * kLanes, s2);
    store(sums + c + 3 * kLanes, s3);
  }
  for (; c < columns; c += kLanes) {
    const Mask m = first_lanes(columns - c < kLanes ? columns - c : kLanes);
    Vf s = load(sums + c, m);
    for (int64_t t = 0; t < rows; ++t) s += load(x + t * stride + c, m);
    store(sums + c, m, s);
  }
}

RowPart cross_entropy_part(float* logits, int64_t vocabulary, int64_t label, bool keep) {
  const Vf minus_infinity = splat(-__builtin_inff());
  Vf top = minus_infinity;
  // The largest of the others first: a tie is no right answer.
  const float target = label < 0 ? -__builtin_inff() : logits[label];
  if (label >= 0) logits[label] = -__builtin_inff();
  for_vectors(vocabulary, [&](int64_t i, auto m) { top = max(select(m, load(logits + i, m), minus_infinity), top); });
  if (label >= 0) logits[label] = target;
  const float others = reduce_max(top), largest = target > others ? target : others;
  const Vf shift = splat(largest);
  Vf sum0 = zero(), sum1 = zero();
  int64_t next = 0;
  for (; next + 2 * kLanes <= vocabulary; next += 2 * kLanes) {
    float* pair = logits + next;
    const Vf e0 = exp_nonpositive(load(pair) - shift), e1 = exp_nonpositive(load(pair + kLanes) - shift);
    sum0 += e0;
    sum1 += e1;
    if (keep) {
      store(pair, e0);
      store(pair + kLanes, e1);
    }
  }
  for_vectors(vocabulary - next, [&](int64_t i, auto m) {
    const Vf e = exp_nonpositive(load(logits + next + i, m) - shift);
    sum0 += select(m, e, zero());
    if (keep) store(logits + next + i, m, e);
  });
  return {largest, reduce_add(sum0 + sum1), others, target};
}

void scale(float factor, int64_t count, float* x) {
  const Vf by = splat(factor);
  for_vectors(count, [&](int64_t i, auto m) { store(x + i, m, load(x + i, m) * by); });
}

}  // namespace sb::SB_ISA
