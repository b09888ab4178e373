#include "plan/tuning/piece_tuner.h"

#include <algorithm>
#include <array>
#include <limits>

#include "plan/batching/parallel_pieces.h"

namespace sb {
namespace {

constexpr int kLevels = 16;

// A rank at every level: the higher, the lower the price and the longer it takes. What was not asked for is not known.
struct RankLevels {
  std::array<double, kLevels> makespan{}, gain{};
  std::array<bool, kLevels> known{};
};

class PieceTuner {
 public:
  explicit PieceTuner(const TuningInput& input)
      : input_(input),
        layers_(input.cost.layers()),
        members_(static_cast<size_t>(input.batches.ranks())),
        ranks_(members_.size()) {
    for (int r = 0; r < input.batches.ranks(); ++r)
      for (int i = input.batches.first(r); i < input.batches.first(r) + input.batches.micro_batches(r); ++i)
        if (input.batches.piece(i).begin == 0)
          for (const int member : input.batches.members(i)) members_[static_cast<size_t>(r)].push_back(member);
    choose_prices();
  }

  // Every rank at a level as high as this time allows; the total gain, or -1 where a rank cannot meet it.
  double gain(double deadline) {
    std::vector<double> own(ranks_.size());
    parallel_pieces(input_.pool, std::ssize(ranks_), [&](int64_t r, int) {
      const int level = highest(static_cast<int>(r), deadline);
      own[static_cast<size_t>(r)] = level < 0 ? -1 : ranks_[static_cast<size_t>(r)].gain[static_cast<size_t>(level)];
    });
    double sum = 0;
    for (const double gain : own) {
      if (gain < 0) return -1;
      sum += gain;
    }
    return sum;
  }
  // Every budget at its floor.
  double fastest() {
    double slowest = 0;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) slowest = std::max(slowest, makespan(r, 0));
    return slowest;
  }
  Budgets budgets(double deadline) {
    Budgets budgets(input_.base.begin(), input_.base.end());
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) set_level(r, highest(r, deadline), budgets);
    return budgets;
  }

 private:
  // So that a level gains about as much as the next one.
  void choose_prices() {
    struct Step {
      double slope, gain;
    };
    std::vector<Step> steps;
    double total = 0;
    const int layers = input_.curves.uniform() ? 1 : layers_;
    for (int i = 0; i < static_cast<int>(input_.sequences.size()); ++i)
      for (int l = 0; l < layers; ++l) {
        const auto vertices = input_.curves.vertices(i, l);
        for (size_t v = 1; v < vertices.size(); ++v) {
          const double gain = tokens(i) * (vertices[v].coverage - vertices[v - 1].coverage);
          steps.push_back({slope(i, vertices, v), gain});
          total += gain;
        }
      }
    std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.slope > b.slope; });
    price_.fill(0.0);
    price_[0] = std::numeric_limits<double>::infinity();
    double sum = 0;
    size_t level = 1;
    for (const Step& step : steps) {
      sum += step.gain;
      while (level + 1 < kLevels && sum >= total * static_cast<double>(level) / (kLevels - 1))
        price_[level++] = step.slope;
    }
  }

  double makespan(int r, int level) {
    RankLevels& rank = ranks_[static_cast<size_t>(r)];
    const auto at = static_cast<size_t>(level);
    if (!rank.known[at]) {
      Budgets budgets(input_.base.begin(), input_.base.end());
      rank.gain[at] = set_level(r, level, budgets);
      const PipelineTimes times = stage_times(input_.cost, input_.sequences, input_.batches, r, budgets);
      rank.makespan[at] = input_.schedules.of(r).makespan(times, input_.orders[static_cast<size_t>(r)]);
      rank.known[at] = true;
    }
    return rank.makespan[at];
  }

  // The budgets that are worth the price of a level; Σ tokens · coverage over the rank's sequences and layers.
  double set_level(int r, int level, Budgets& budgets) const {
    double gain = 0;
    for (const int member : members_[static_cast<size_t>(r)]) {
      double own = 0;
      for (int l = 0; l < layers_; ++l) {
        const size_t at = static_cast<size_t>(member) * static_cast<size_t>(layers_) + static_cast<size_t>(l);
        if (l > 0 && input_.curves.uniform()) {
          budgets[at] = budgets[at - 1];
        } else {
          const auto vertices = input_.curves.vertices(member, l);
          size_t v = 0;
          while (v + 1 < vertices.size() && slope(member, vertices, v + 1) >= price_[static_cast<size_t>(level)]) ++v;
          budgets[at] = vertices[v].budget;
          own = vertices[v].coverage;
        }
        gain += tokens(member) * own;
      }
    }
    return gain;
  }

  // A level that meets the deadline, by halving: higher ones nearly always take longer. -1: not even the floor does.
  int highest(int r, double deadline) {
    if (makespan(r, 0) > deadline) return -1;
    int low = 0, high = kLevels;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (makespan(r, middle) <= deadline ? low : high) = middle;
    }
    return low;
  }

  double tokens(int sequence) const {
    return static_cast<double>(input_.sequences[static_cast<size_t>(sequence)].tokens);
  }
  double slope(int sequence, std::span<const BudgetCurves::Vertex> vertices, size_t v) const {
    const int64_t n = input_.sequences[static_cast<size_t>(sequence)].tokens;
    const double pairs = selected_pairs(n, vertices[v].budget) - selected_pairs(n, vertices[v - 1].budget);
    return tokens(sequence) * (vertices[v].coverage - vertices[v - 1].coverage) / pairs;
  }

  const TuningInput& input_;
  int layers_;
  std::vector<std::vector<int>> members_;  // sequences of every rank
  std::array<double, kLevels> price_{};
  std::vector<RankLevels> ranks_;
};

}  // namespace

TuningResult tune_pieces(const TuningInput& input, const TuningOptions& options) {
  const double base =
      step_makespan(input.cost, input.schedules, input.sequences, input.batches, input.orders, input.base);
  PieceTuner tuner(input);
  TuningResult result;
  result.budgets.assign(input.base.begin(), input.base.end());
  result.fastest = tuner.fastest();
  result.deadline = base;
  if (options.target == kEqualCoverage) {
    // The earliest deadline at which the coverage is that of the base budgets.
    const double aim = input.curves.base_total();
    if (tuner.gain(base) < aim) return result;
    double early = std::min(result.fastest, base);
    constexpr int kHalvings = 12;
    for (int i = 0; i < kHalvings; ++i) {
      const double middle = 0.5 * (early + result.deadline);
      (tuner.gain(middle) < aim ? early : result.deadline) = middle;
    }
  } else {
    result.deadline = std::max(result.fastest, result.fastest + options.target * (base - result.fastest));
  }
  result.budgets = tuner.budgets(result.deadline);
  return result;
}

}  // namespace sb
