#include "python/bindings/selection_learner.h"

#include "attention/gpu/plan/given_selection.h"
#include "attention/select/selector.h"
#include "core/errors.h"

namespace sb::python {
namespace {

PlaneSums sums_of(std::span<const double> values) {
  SB_USER_CHECK(values.size() % 3 == 1, "sums of planes: {} numbers; there are a count and three for every channel",
                values.size());
  const size_t width = values.size() / 3;
  const auto part = [&](size_t i) {
    const auto from = values.subspan(1 + i * width, width);
    return std::vector<double>(from.begin(), from.end());
  };
  return {values[0], part(0), part(1), part(2)};
}

std::vector<double> values_of(const PlaneSums& sums) {
  if (sums.tokens == 0) return {};
  std::vector<double> values{sums.tokens};
  for (const auto* part : {&sums.query_squares, &sums.key_sums, &sums.key_squares})
    values.insert(values.end(), part->begin(), part->end());
  return values;
}

size_t checked(int64_t layer) {
  constexpr int64_t kMostLayers = 65536;
  SB_USER_CHECK(layer >= 0 && layer < kMostLayers, "layer {}", layer);
  return static_cast<size_t>(layer);
}

}  // namespace

SelectionLearner::SelectionLearner(const SelectionConfig& config) : config_(config) {
  if (config.pattern != SelectionPattern::dense) check_selection_config(config);
}

std::vector<uint32_t> SelectionLearner::planes(int layer, const AttentionShape& shape) const {
  const size_t at = checked(layer);
  if (!config_.judges_by_planes() || at >= learned_.planes.size() || learned_.planes[at].tokens == 0) return {};
  const PlaneSums& sums = learned_.planes[at];
  SB_USER_CHECK(std::ssize(sums.key_sums) == int64_t{shape.kv_heads} * shape.head_dim,
                "what was learned of layer {} is of {} channels; {} kv heads of {} are asked for", layer,
                sums.key_sums.size(), shape.kv_heads, shape.head_dim);
  SelectionConfig settled = config_;
  settle_score_channels(settled, shape.head_dim);
  return plane_words(select_planes(shape, sums, settled.score_channels));
}

template <typename Body>
void SelectionLearner::each_sequence(std::span<const int32_t> cu_seqlens, std::span<const int32_t> budgets,
                                     Body body) const {
  SB_USER_CHECK(!cu_seqlens.empty() && (budgets.empty() || budgets.size() + 1 == cu_seqlens.size()),
                "{} budgets for cu_seqlens of {} numbers", budgets.size(), cu_seqlens.size());
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    body(s, sequence_tiles(config_, cu_seqlens[s + 1] - cu_seqlens[s], budgets.empty() ? config_.budget : budgets[s]));
}

std::vector<float> SelectionLearner::thresholds(int layer, std::span<const int32_t> cu_seqlens,
                                                std::span<const int32_t> budgets) const {
  std::vector<float> found;
  if (!config_.learns_thresholds()) return found;
  each_sequence(cu_seqlens, budgets, [&](size_t, const SequenceTiles& tiles) {
    const bool selects = !runs_dense(config_, layer, tiles);
    found.push_back(selects ? mass_threshold(learned_, layer, tiles) - start_threshold(tiles) : 0.0f);
  });
  return found;
}

void SelectionLearner::observe_sums(int layer, std::span<const double> sums) {
  const size_t at = checked(layer);
  seen_.planes.resize(std::max(seen_.planes.size(), at + 1));
  seen_.planes[at] += sums_of(sums);
}

void SelectionLearner::observe_counts(int layer, std::span<const int32_t> cu_seqlens, std::span<const int32_t> budgets,
                                      std::span<const int64_t> counts) {
  if (!config_.learns_thresholds()) return;
  SB_USER_CHECK(counts.size() == 2 * (cu_seqlens.size() - 1), "counts of {} sequences for {}", counts.size() / 2,
                cu_seqlens.size() - 1);
  each_sequence(cu_seqlens, budgets, [&](size_t s, const SequenceTiles& tiles) {
    const MassCounts seen{counts[2 * s], counts[2 * s + 1]};
    if (seen.wanted > 0) seen_.masses[mass_key(layer, tiles)] += seen;
  });
}

std::vector<SelectionLearner::Mass> SelectionLearner::take_masses() {
  std::vector<Mass> masses;
  for (const auto& [key, counts] : seen_.masses)
    masses.push_back({key.layer, key.length_class, key.budget_class, counts.selected, counts.wanted});
  seen_.masses.clear();
  return masses;
}

void SelectionLearner::add_masses(const std::vector<Mass>& masses) {
  for (const Mass& one : masses)
    seen_.masses[{static_cast<int>(one[0]), static_cast<int>(one[1]), static_cast<int>(one[2])}] +=
        MassCounts{one[3], one[4]};
}

void SelectionLearner::learn() {
  learned_ = sb::learn(learned_, seen_);
  seen_ = {};
}

SelectionLearner::State SelectionLearner::state() const {
  State state;
  for (const PlaneSums& sums : learned_.planes) state.first.push_back(values_of(sums));
  for (const auto& [key, known] : learned_.thresholds)
    state.second.push_back({static_cast<double>(key.layer), static_cast<double>(key.length_class),
                            static_cast<double>(key.budget_class), known.correction, known.gain, known.last});
  return state;
}

void SelectionLearner::set_state(const std::vector<std::vector<double>>& planes,
                                 const std::vector<std::array<double, 6>>& thresholds) {
  LearnedSelection learned;
  for (const std::vector<double>& values : planes)
    learned.planes.push_back(values.empty() ? PlaneSums{} : sums_of(values));
  for (const std::array<double, 6>& one : thresholds)
    learned.thresholds[{static_cast<int>(one[0]), static_cast<int>(one[1]), static_cast<int>(one[2])}] = {
        static_cast<float>(one[3]), static_cast<float>(one[4]), static_cast<float>(one[5])};
  learned_ = std::move(learned);
  seen_ = {};
}

}  // namespace sb::python
