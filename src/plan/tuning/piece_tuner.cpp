#include "plan/tuning/piece_tuner.h"

#include <algorithm>
#include <array>
#include <limits>

#include "plan/batching/parallel_pieces.h"

namespace sb {
namespace {

constexpr int kLevels = 16;

// A rank at every level: the higher, the lower the price and the longer it takes.
struct RankLevels {
  std::array<double, kLevels> makespan{}, gain{};
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
    parallel_pieces(input.pool, std::ssize(ranks_), [&](int64_t r, int) { build_rank(static_cast<int>(r)); });
  }

  // Every rank at its highest level in this time; the total gain, or nothing where a rank cannot meet it.
  double gain(double deadline) const {
    double sum = 0;
    for (const RankLevels& rank : ranks_) {
      const int level = highest(rank, deadline);
      if (level < 0) return -1;
      sum += rank.gain[static_cast<size_t>(level)];
    }
    return sum;
  }
  // Deadlines at which some rank reaches another level, ascending.
  std::vector<double> deadlines() const {
    std::vector<double> all;
    for (const RankLevels& rank : ranks_) all.insert(all.end(), rank.makespan.begin(), rank.makespan.end());
    std::sort(all.begin(), all.end());
    return all;
  }
  double fastest() const {
    double slowest = 0;
    for (const RankLevels& rank : ranks_)
      slowest = std::max(slowest, *std::min_element(rank.makespan.begin(), rank.makespan.end()));
    return slowest;
  }
  Budgets budgets(double deadline) const {
    Budgets budgets(input_.base.begin(), input_.base.end());
    for (size_t r = 0; r < ranks_.size(); ++r) set_level(static_cast<int>(r), highest(ranks_[r], deadline), budgets);
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

  void build_rank(int r) {
    Budgets budgets(input_.base.begin(), input_.base.end());
    RankLevels& rank = ranks_[static_cast<size_t>(r)];
    for (size_t level = 0; level < kLevels; ++level) {
      rank.gain[level] = set_level(r, static_cast<int>(level), budgets);
      const PipelineTimes times = stage_times(input_.cost, input_.sequences, input_.batches, r, budgets);
      rank.makespan[level] = input_.schedules.of(r).makespan(times, input_.orders[static_cast<size_t>(r)]);
    }
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

  static int highest(const RankLevels& rank, double deadline) {
    int level = kLevels - 1;
    while (level >= 0 && rank.makespan[static_cast<size_t>(level)] > deadline) --level;
    return level;
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
  const PieceTuner tuner(input);
  TuningResult result;
  result.budgets.assign(input.base.begin(), input.base.end());
  result.fastest = tuner.fastest();
  result.deadline = base;
  if (options.target == kEqualCoverage) {
    // The first deadline at which the coverage is that of the base budgets; it never falls with more time.
    const std::vector<double> deadlines = tuner.deadlines();
    const double aim = input.curves.base_total();
    const auto found =
        std::partition_point(deadlines.begin(), deadlines.end(), [&](double at) { return tuner.gain(at) < aim; });
    if (found == deadlines.end() || *found >= base) return result;
    result.deadline = *found;
  } else {
    result.deadline = std::max(result.fastest, result.fastest + options.target * (base - result.fastest));
  }
  result.budgets = tuner.budgets(result.deadline);
  return result;
}

}  // namespace sb
