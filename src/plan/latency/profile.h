#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "plan/latency/links.h"
#include "plan/latency/model_shape.h"
#include "plan/latency/workload.h"

namespace sb {

// The operations whose latency is predicted; the first seven run once a micro-batch (and layer).
enum class Operation {
  linear_forward,
  linear_backward,
  attention_forward,
  attention_backward,
  selection,
  head_forward,  // embedding, final norm, vocabulary projection and loss
  head_backward,
};
inline constexpr int kOperations = 7;
const char* operation_name(Operation operation);

// Monotone piecewise-linear function, extended by its last slope; microseconds over a coordinate.
struct PiecewiseLinear {
  std::vector<double> x, y;  // x ascending from 0, y non-decreasing
  double operator()(double at) const {
    if (x.size() == 2) return y[0] + (y[1] - y[0]) * (at / x[1]);
    size_t i = 1;
    while (i + 1 < x.size() && at > x[i]) ++i;
    return y[i - 1] + (y[i] - y[i - 1]) * ((at - x[i - 1]) / (x[i] - x[i - 1]));
  }
};

enum class Coordinate { tokens, tiles, pairs, scores };
inline double coordinate(const Work& work, Coordinate which) {
  switch (which) {
    case Coordinate::tokens:
      return work.tokens;
    case Coordinate::tiles:
      return work.tiles;
    case Coordinate::pairs:
      return work.pairs;
    case Coordinate::scores:
      return work.scores;
  }
  return 0;
}

// Latency of one operation: piecewise-linear along one coordinate, plus a non-negative rate for the others.
struct OperationTable {
  Coordinate along = Coordinate::tokens;
  PiecewiseLinear curve;
  double per_tile = 0, per_token = 0, per_score = 0, per_prefix = 0;  // microseconds
  double operator()(const Work& work) const {
    return curve(coordinate(work, along)) + per_tile * work.tiles + per_token * work.tokens + per_score * work.scores +
           per_prefix * work.prefix;
  }
};

struct ErrorSummary {
  double median = 0, p95 = 0;  // of |predicted / measured - 1|
  int64_t count = 0;
};
ErrorSummary summarize_errors(std::vector<double> relative_errors);

// Latencies of one machine for one model shape.
struct Profile {
  static constexpr int kVersion = 3;
  // Files of the first version do not tell pattern and score: causal `topk` by moments, the only way there was. Those
  // before the third give GPUs links that nobody measured: what is assumed today takes their place. Still read.
  static constexpr int kOldestVersion = 1, kTellsScore = 2, kMeasuredLinks = 3;
  std::string name;     // "h200-analytic", or the file
  std::string machine;  // what was measured
  std::string date;
  std::string recompute = "attention";  // contained in the backward tables
  int64_t lora_rank = 0;                // above 0: adapters are trained, and the model itself is frozen
  bool adapters_measured = true;        // false: derived from tables of the whole model in training
  // How pairs were selected as it was measured; none in analytic profiles and in files that do not tell.
  struct Attention {
    int64_t block = 0, query_block = 0;
    std::string pattern, score;
    int64_t score_channels = 0, score_tokens = 0;
  };
  std::optional<Attention> attention;
  ModelShape shape;
  std::array<OperationTable, kOperations> tables;
  // Pieces of sequences were measured too. Otherwise what their prefix costs is assumed: sums of the gradients of its
  // keys and values, fp32, read and written once at the rate of the machine's memory.
  bool prefix_measured = false;
  Links links = assumed_links();
  double peak_tflops = 0;    // 0: unknown
  int64_t memory_bytes = 0;  // of one device; 0: unknown
  ErrorSummary held_out;     // shapes measured and not fitted; count 0: analytic
};

// h200-analytic, h100-analytic, a100-analytic, h20-analytic.
std::vector<std::string> analytic_profiles();
bool is_analytic_profile(const std::string& name);
// `spec` says what selection judges by.
Profile analytic_profile(const std::string& name, const ModelShape& shape, const AttentionSpec& spec = {});

// Sets what the prefix of a piece costs where nobody has measured it.
void assume_prefix(Profile& profile);

Profile parse_profile(const std::string& json, const std::string& where);
std::string write_profile(const Profile& profile);
// A built-in name or a file; a measured profile must be of this shape. `spec` is for analytic ones. Of built-in ones
// that of adapters of this rank is taken where there is one, otherwise that of the whole model in training:
// with_adapters() makes the best of it.
Profile find_profile(const std::string& name_or_path, const ModelShape& shape, const AttentionSpec& spec,
                     int64_t lora_rank = 0);
// UserError when `spec` has other blocks than were measured, or other parts of them are judged. `names`: how its block,
// query_block and score_tokens are called where they can be changed.
void check_measured_blocks(const Profile& profile, const AttentionSpec& spec, const std::array<const char*, 3>& names);
// What to say when pairs were selected by another pattern or score than those of `spec`, after the profile's name;
// empty: they were not. The time of selecting is then predicted as it was measured: a few per cent of a layer are at
// stake, which running corrections find, so that this is no error.
std::string selected_otherwise(const Profile& profile, const AttentionSpec& spec);
// `spec` with the pattern and score that were measured, whose scores the tables count.
AttentionSpec as_measured(const Profile& profile, AttentionSpec spec);

}  // namespace sb
