#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/index/block_index.h"

namespace sb {

// Standard normal numbers times `spread`: those that Random(seed) gives from number `first` on.
std::vector<float> draw_normal(int64_t count, uint64_t seed, int64_t first = 0, double spread = 1.0);

// Operands of one attention call with memory of their own, random.
struct AttentionCase {
  AttentionCase(AttentionShape shape, std::vector<int32_t> lengths, uint64_t seed = 1, double spread = 1.0);

  int64_t tokens() const { return cu_seqlens.back(); }
  PackedSequences sequences() const { return {cu_seqlens, {}}; }

  AttentionShape shape;
  std::vector<int32_t> cu_seqlens;
  std::vector<float> q, k, v, dout;
};

// Results of a call: of the code under test (fp32) or of the reference (fp64).
template <typename T>
struct AttentionResults {
  std::vector<T> out, lse, dq, dk, dv;
  bool operator==(const AttentionResults&) const = default;
};

// Whether query head `head` of sequence `sequence` looks from token `query` at token `key` <= query; tokens counted
// from the start of the sequence.
using SeesKey = std::function<bool(int head, int sequence, int query, int key)>;

// Masked attention straight from the definition, with a full row of probabilities for every query, in fp64.
AttentionResults<double> reference_attention(const AttentionCase& c, const SeesKey& sees);
bool sees_everything(int head, int sequence, int query, int key);
// What the definition of the index says, entry by entry. The index must outlive the result.
SeesKey sees_by(const BlockIndex& index, const AttentionShape& shape);

// Runs forward and backward of an implementation on `threads` threads with exactly the scratch memory it asks for. The
// outputs hold NaN before, so that whatever is not written is noticed.
AttentionResults<float> run_attention(Attention& attention, const AttentionCase& c, int threads);

// Largest |actual - expected| / (1 + largest |expected|) has to stay below `tolerance`; infinities must agree.
void expect_close(const AttentionResults<float>& actual, const AttentionResults<double>& expected,
                  double tolerance = 1e-5);

}  // namespace sb
