#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace sb {

// Up to this many sequences a plan may take its time: it is well under a millisecond anyway.
inline constexpr size_t kSmallStep = 64;

// One training document of a global batch.
struct Sequence {
  int64_t id = 0;  // unique in the global batch; breaks ties
  int64_t tokens = 0;
  bool operator==(const Sequence&) const = default;
};

// What the plan has to know about attention.
struct AttentionSpec {
  // Budgets are 32-bit numbers, also when they are rounded up to a block.
  static constexpr int64_t kMostBudget = (int64_t{1} << 31) - 1 - 256;
  int64_t block = 128;
  int64_t query_block = 16;
  std::string pattern = "mass", score = "planes";  // by the names that run.yaml has for them
  int64_t score_channels = 32;                     // of a head, by planes, which judge every key; 0: by another score
  int64_t score_tokens = 0;                        // keys that another score judges together; 0: a block
  int64_t budget = 8192;                           // keys per query, the base that tuning starts from
  int64_t sink_blocks = 1;
  int64_t local_blocks = 2;
  int64_t dense_below = -1;       // sequences up to this length run dense; -1: the budget
  int64_t max_budget = 0;         // what memory was planned for; 0: up to dense
  std::vector<int> dense_layers;  // that tuning must leave dense whatever the sequence

  int64_t judged_together() const { return score_channels > 0 ? 1 : score_tokens > 0 ? score_tokens : block; }
  int64_t dense_limit() const { return dense_below < 0 ? budget : dense_below; }
  // A sequence that tuning must leave dense.
  bool always_dense(int64_t tokens) const { return tokens <= dense_limit() || tokens <= budget; }
  int64_t base_budget(int64_t tokens) const { return always_dense(tokens) ? tokens : budget; }
  bool dense_layer(int layer) const { return std::ranges::find(dense_layers, layer) != dense_layers.end(); }
  int64_t base_budget(int64_t tokens, int layer) const { return dense_layer(layer) ? tokens : base_budget(tokens); }
  // Sinks, local blocks and two more: below that a selector has nothing left to select from.
  int64_t least_budget() const { return (sink_blocks + local_blocks + 2) * block; }
};

// Query × key token pairs of a causal sequence of n tokens whose queries see k keys each (fewer at the start).
inline double selected_pairs(int64_t tokens, int64_t budget) {
  const double n = static_cast<double>(tokens), k = static_cast<double>(std::min(tokens, budget));
  return k * (n - 0.5 * k);
}

// The coordinates in which latencies are measured and predicted: sums over the sequences of one micro-batch, for one
// layer.
struct Work {
  double tokens = 0;
  double tiles = 0;   // query tiles
  double pairs = 0;   // selected query × key token pairs
  double scores = 0;  // query × key (or part of a block, or block) scores that selection computes
  double prefix = 0;  // keys up to the end of a piece of a cut sequence: sums of their gradients are read and written
  Work& operator+=(const Work& other) {
    tokens += other.tokens;
    tiles += other.tiles;
    pairs += other.pairs;
    scores += other.scores;
    prefix += other.prefix;
    return *this;
  }
};

// Tokens of a cut sequence; end 0: the sequence is whole.
struct Piece {
  int64_t begin = 0, end = 0;
  bool operator==(const Piece&) const = default;
};
// Pieces begin and end where key blocks and query blocks do.
inline int64_t piece_edge(const AttentionSpec& spec) {
  return std::lcm(spec.block, spec.query_block);
}

// Of the queries from `begin` to `end` of a sequence, which see all keys before them that their budget allows.
inline Work work_between(const AttentionSpec& spec, int64_t length, int64_t begin, int64_t end, int64_t budget) {
  const double a = static_cast<double>(begin), b = static_cast<double>(end);
  const bool dense = budget >= length;
  return {b - a, static_cast<double>((end - begin + spec.query_block - 1) / spec.query_block),
          selected_pairs(end, budget) - selected_pairs(begin, budget),
          dense ? 0.0 : 0.5 * (b * b - a * a) / static_cast<double>(spec.judged_together())};
}

inline Work work_of(const AttentionSpec& spec, int64_t tokens, int64_t budget) {
  return work_between(spec, tokens, 0, tokens, budget);
}
inline Work work_of(const AttentionSpec& spec, int64_t length, const Piece& piece, int64_t budget) {
  if (piece.end == 0) return work_of(spec, length, budget);
  Work work = work_between(spec, length, piece.begin, piece.end, budget);
  work.prefix = static_cast<double>(piece.end);
  return work;
}

}  // namespace sb
