#include "data/synthetic/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/errors.h"
#include "data/synthetic/synthetic_tasks.h"

namespace sb {
namespace {

constexpr std::pair<SyntheticTask, std::string_view> kSyntheticNames[] = {
    {SyntheticTask::chunk_recall, "chunk_recall"},
    {SyntheticTask::copy, "copy"},
    {SyntheticTask::needle_single, "needle_single"},
    {SyntheticTask::needle_multi_key, "needle_multi_key"},
    {SyntheticTask::needle_multi_value, "needle_multi_value"},
    {SyntheticTask::needle_multi_query, "needle_multi_query"},
    {SyntheticTask::variable_tracking, "variable_tracking"},
    {SyntheticTask::common_words, "common_words"},
    {SyntheticTask::frequent_words, "frequent_words"},
    {SyntheticTask::associative_recall, "associative_recall"},
};

// Philox streams under the run's seed: one for lengths, one per sequence for its content.
constexpr uint64_t kLengthStream = uint64_t{0x4C} << 56;
constexpr uint64_t kContentStream = uint64_t{0x53} << 56;

bool is_recall(SyntheticTask task) {
  return task == SyntheticTask::chunk_recall || task == SyntheticTask::copy;
}

class SyntheticSource final : public SequenceSource {
 public:
  SyntheticSource(const SyntheticOptions& options, uint64_t seed) : options_(options), seed_(seed) {
    if (options.curriculum) curriculum_.emplace(*options.curriculum);
    const auto& pool = options.length.pool;
    const bool from_pool = options.length.kind == LengthDistribution::Kind::pool;
    SB_USER_CHECK(curriculum_ || !from_pool || !pool.empty(), "synthetic: the pool of lengths is empty");
    SB_USER_CHECK(curriculum_ || from_pool || options.length.min <= options.length.max,
                  "synthetic: the minimum length ({}) is above the maximum ({})", options.length.min,
                  options.length.max);
    const int64_t shortest = curriculum_ ? options.curriculum->start
                             : from_pool ? *std::min_element(pool.begin(), pool.end())
                                         : options.length.min;
    longest_ = curriculum_ ? options.curriculum->end
               : from_pool ? *std::max_element(pool.begin(), pool.end())
                           : options.length.max;
    SB_USER_CHECK(longest_ <= int64_t{1} << 31, "synthetic: a length of {} exceeds 2^31", longest_);
    if (is_recall(options.task))
      synthetic::check_recall(options, shortest);
    else
      synthetic::check_retrieval(options, shortest);
  }

  int64_t length(uint64_t position) const override {
    return curriculum_ ? curriculum_->length_at(position) : options_.length.at(seed_, position);
  }
  int64_t valid_targets(uint64_t position) const override {
    return is_recall(options_.task) ? synthetic::count_recall_targets(options_, length(position))
                                    : synthetic::count_retrieval_targets(options_);
  }
  int64_t max_length() const override { return longest_; }

  TokenSequence read(uint64_t position) const override {
    const int64_t n = length(position);
    Random random(seed_, kContentStream ^ position);
    const synthetic::Draft draft = is_recall(options_.task) ? synthetic::make_recall(options_, n, random)
                                                            : synthetic::make_retrieval(options_, n, random);
    SB_CHECK(static_cast<int64_t>(draft.tokens.size()) == n, "made {} tokens instead of {}", draft.tokens.size(), n);
    TokenSequence sequence;
    sequence.id = static_cast<int64_t>(position);
    sequence.tokens = draft.tokens;
    sequence.labels.assign(draft.tokens.size(), kIgnoredLabel);
    for (size_t i = 0; i + 1 < draft.tokens.size(); ++i)
      if (draft.answer[i + 1]) sequence.labels[i] = draft.tokens[i + 1];
    return sequence;
  }

  bool observe(int64_t correct, int64_t counted, uint64_t next_position) override {
    return curriculum_ && curriculum_->observe(correct, counted, next_position);
  }
  std::string state() const override { return curriculum_ ? curriculum_->state() : std::string(); }
  void restore_state(const std::string& state) override {
    SB_USER_CHECK(
        curriculum_.has_value() == !state.empty(),
        "the checkpoint's data state \"{}\" does not match this configuration: it was written {} a curriculum", state,
        state.empty() ? "without" : "with");
    if (curriculum_) curriculum_->restore(state);
  }

 private:
  SyntheticOptions options_;
  uint64_t seed_;
  std::optional<LengthCurriculum> curriculum_;
  int64_t longest_ = 0;
};

}  // namespace

SyntheticTask parse_synthetic_task(std::string_view name) {
  for (const auto& [task, known] : kSyntheticNames)
    if (known == name) return task;
  throw UserError("unknown synthetic task \"{}\"; choose from {}", name, fmt::join(synthetic_task_names(), ", "));
}

std::string_view synthetic_task_name(SyntheticTask task) {
  for (const auto& [known, name] : kSyntheticNames)
    if (known == task) return name;
  throw InternalError("no such task: {}", static_cast<int>(task));
}

std::vector<std::string_view> synthetic_task_names() {
  std::vector<std::string_view> names;
  for (const auto& entry : kSyntheticNames) names.push_back(entry.second);
  return names;
}

LengthDistribution LengthDistribution::from_pool(std::vector<int64_t> lengths) {
  return {Kind::pool, 0, 0, std::move(lengths)};
}

int64_t LengthDistribution::at(uint64_t seed, uint64_t position) const {
  if (kind == Kind::fixed) return min;
  Random random(seed, kLengthStream ^ position);
  if (kind == Kind::pool) return pool[random.below(pool.size())];
  if (kind == Kind::uniform) return min + static_cast<int64_t>(random.below(static_cast<uint64_t>(max - min + 1)));
  const double low = std::log(static_cast<double>(min)), high = std::log(static_cast<double>(max) + 1.0);
  const double drawn = std::exp(low + (high - low) * random.uniform());
  return std::clamp(static_cast<int64_t>(drawn), min, max);
}

std::unique_ptr<SequenceSource> make_synthetic_source(const SyntheticOptions& options, uint64_t seed) {
  return std::make_unique<SyntheticSource>(options, seed);
}

}  // namespace sb
