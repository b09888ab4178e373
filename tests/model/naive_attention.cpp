#include "tests/model/naive_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace sb::test {

namespace {

// Which layer and micro-batch size a state belongs to, to catch states that get mixed up.
struct NaiveState final : AttentionState {
  int layer = -1;
  int64_t tokens = -1;
};

float* head_of(const TensorView& tensor, int64_t token, int64_t head) {
  return tensor.f32() + (token * tensor.dim(1) + head) * tensor.dim(2);
}

double dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

// Calls body(head, kv_head, query, first key of the query's sequence) for every query of every head.
template <typename Body>
void each_query(const AttentionShape& shape, const PackedSequences& sequences, const Body& body) {
  for (int head = 0; head < shape.heads; ++head) {
    for (int s = 0; s < sequences.sequences(); ++s) {
      for (int64_t i = sequences.cu_seqlens[s]; i < sequences.cu_seqlens[s + 1]; ++i) {
        body(head, head / shape.group(), i, int64_t{sequences.cu_seqlens[s]});
      }
    }
  }
}

}  // namespace

std::unique_ptr<AttentionState> NaiveAttention::make_state() const {
  return std::make_unique<NaiveState>();
}

void NaiveAttention::forward(const Exec&, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, AttentionState& state, bool replay) {
  auto& own = dynamic_cast<NaiveState&>(state);
  if (replay) SB_CHECK(own.layer == layer && own.tokens == sequences.tokens(), "replay of another state");
  own.layer = layer;
  own.tokens = sequences.tokens();
  forward_calls.push_back({layer, replay, {sequences.budgets.begin(), sequences.budgets.end()}});

  const int64_t d = shape.head_dim, tokens = sequences.tokens();
  each_query(shape, sequences, [&](int head, int kv_head, int64_t i, int64_t begin) {
    std::vector<double> score;
    for (int64_t j = begin; j <= i; ++j) {
      score.push_back(shape.scale * dot(head_of(operands.q, i, head), head_of(operands.k, j, kv_head), d));
    }
    const double top = *std::max_element(score.begin(), score.end());
    double sum = 0;
    for (const double s : score) sum += std::exp(s - top);
    const double lse = top + std::log(sum);
    operands.lse.f32()[head * tokens + i] = static_cast<float>(lse);
    for (int64_t c = 0; c < d; ++c) {
      double value = 0;
      for (int64_t j = begin; j <= i; ++j) {
        value += std::exp(score[static_cast<size_t>(j - begin)] - lse) * head_of(operands.v, j, kv_head)[c];
      }
      head_of(operands.out, i, head)[c] = static_cast<float>(value);
    }
  });
}

void NaiveAttention::backward(const Exec&, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                              const AttentionOperands& operands, const AttentionGradients& gradients,
                              AttentionState& state) {
  const auto& own = dynamic_cast<NaiveState&>(state);
  SB_CHECK(own.layer == layer && own.tokens == sequences.tokens(), "backward with another state");
  backward_calls.push_back({layer, false, {sequences.budgets.begin(), sequences.budgets.end()}});

  const int64_t d = shape.head_dim, tokens = sequences.tokens();
  std::vector<double> dq(static_cast<size_t>(gradients.dq.elements())),
      dk(static_cast<size_t>(gradients.dk.elements())), dv(static_cast<size_t>(gradients.dv.elements()));
  each_query(shape, sequences, [&](int head, int kv_head, int64_t i, int64_t begin) {
    const float* dout = head_of(gradients.dout, i, head);
    const double delta = dot(dout, head_of(operands.out, i, head), d);
    const double lse = operands.lse.f32()[head * tokens + i];
    double* dq_row = &dq[static_cast<size_t>((i * shape.heads + head) * d)];
    for (int64_t j = begin; j <= i; ++j) {
      const float *q = head_of(operands.q, i, head), *k = head_of(operands.k, j, kv_head),
                  *v = head_of(operands.v, j, kv_head);
      const double p = std::exp(shape.scale * dot(q, k, d) - lse);
      const double ds = p * (dot(dout, v, d) - delta) * shape.scale;
      const auto row = static_cast<size_t>((j * shape.kv_heads + kv_head) * d);
      for (int64_t c = 0; c < d; ++c) {
        dq_row[c] += ds * k[c];
        dk[row + static_cast<size_t>(c)] += ds * q[c];
        dv[row + static_cast<size_t>(c)] += p * dout[c];
      }
    }
  });
  const auto store = [](const std::vector<double>& from, const TensorView& to) {
    std::transform(from.begin(), from.end(), to.f32(), [](double x) { return static_cast<float>(x); });
  };
  store(dq, gradients.dq);
  store(dk, gradients.dk);
  store(dv, gradients.dv);
}

int64_t NaiveAttention::scratch_bytes(const AttentionShape&, int64_t, int) const {
  return 0;
}

int64_t NaiveAttention::state_bytes(const AttentionShape&, int64_t) const {
  return 0;
}

}  // namespace sb::test
