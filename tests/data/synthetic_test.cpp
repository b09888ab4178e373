#include "data/synthetic/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <span>

#include "core/errors.h"

namespace sb {
namespace {

const std::vector<SyntheticTask>& all_tasks() {
  static const std::vector<SyntheticTask> tasks = [] {
    std::vector<SyntheticTask> list;
    for (std::string_view name : synthetic_task_names()) list.push_back(parse_synthetic_task(name));
    return list;
  }();
  return tasks;
}

SyntheticOptions options_for(SyntheticTask task, int64_t length, int64_t vocab = 200) {
  SyntheticOptions options;
  options.task = task;
  options.length = LengthDistribution::fixed(length);
  options.vocab_size = vocab;
  return options;
}

TEST(Synthetic, EveryTaskKeepsThePromisesOfASource) {
  for (SyntheticTask task : all_tasks())
    for (int64_t length : {1024, 1031, 2048}) {
      SCOPED_TRACE(std::string(synthetic_task_name(task)) + " " + std::to_string(length));
      const auto source = make_synthetic_source(options_for(task, length), 7);
      const auto again = make_synthetic_source(options_for(task, length), 7);
      const auto other = make_synthetic_source(options_for(task, length), 8);
      for (uint64_t position : {uint64_t{0}, uint64_t{5}, uint64_t{1} << 40}) {
        const TokenSequence sequence = source->read(position);
        ASSERT_EQ(static_cast<int64_t>(sequence.tokens.size()), length);
        ASSERT_EQ(sequence.labels.size(), sequence.tokens.size());
        EXPECT_EQ(source->length(position), length);
        int64_t counted = 0;
        for (size_t i = 0; i < sequence.tokens.size(); ++i) {
          ASSERT_GE(sequence.tokens[i], 0);
          ASSERT_LT(sequence.tokens[i], 200);
          if (sequence.labels[i] == kIgnoredLabel) continue;
          ++counted;
          ASSERT_LT(i + 1, sequence.tokens.size());
          ASSERT_EQ(sequence.labels[i], sequence.tokens[i + 1]);
        }
        EXPECT_EQ(counted, source->valid_targets(position));
        EXPECT_GT(counted, 0);
        EXPECT_EQ(again->read(position).tokens, sequence.tokens);
        EXPECT_NE(other->read(position).tokens, sequence.tokens);
        EXPECT_NE(source->read(position + 1).tokens, sequence.tokens);
      }
    }
}

TEST(Synthetic, ChunkRecallIsTheTaskDescribed) {
  for (int64_t length : {64, 2048, 2053}) {
    SyntheticOptions options = options_for(SyntheticTask::chunk_recall, length, 100000);
    const TokenSequence s = make_synthetic_source(options, 3)->read(11);
    const int64_t half = length / 2;
    // Nothing counts in the first half, nor the first token of a chunk.
    for (int64_t i = 0; i < length; ++i)
      EXPECT_EQ(s.labels[static_cast<size_t>(i)] != kIgnoredLabel,
                i + 1 < length && i + 1 >= half && (i + 1 - half) % 8 != 0)
          << i;
    // With a huge vocabulary every chunk occurs at one place of the first half.
    for (int64_t at = half; at + 8 <= length; at += 8) {
      const auto found =
          std::search(s.tokens.begin(), s.tokens.begin() + half, s.tokens.begin() + at, s.tokens.begin() + at + 8);
      EXPECT_NE(found, s.tokens.begin() + half) << at;
    }
    EXPECT_EQ(chunk_recall_token(half - 1, length), 0);
    EXPECT_EQ(chunk_recall_token(half, length), 2);
    EXPECT_EQ(chunk_recall_token(half + 6, length), 8);
    EXPECT_EQ(chunk_recall_token(half + 7, length), 0);
    EXPECT_EQ(chunk_recall_token(length - 1, length), 0);
  }
}

TEST(Synthetic, CopyRepeatsTheFirstHalf) {
  for (int64_t length : {10, 11}) {
    const TokenSequence s = make_synthetic_source(options_for(SyntheticTask::copy, length), 3)->read(0);
    const int64_t half = (length + 1) / 2;
    for (int64_t i = 0; half + i < length; ++i)
      EXPECT_EQ(s.tokens[static_cast<size_t>(half + i)], s.tokens[static_cast<size_t>(i)]);
  }
}

TEST(Synthetic, CurriculumChangesTheLengthFromAPositionOn) {
  SyntheticOptions options = options_for(SyntheticTask::chunk_recall, 2048);
  options.curriculum = CurriculumOptions{};
  options.curriculum->start = 64;
  options.curriculum->end = 256;
  options.curriculum->min_observations = 1;
  auto source = make_synthetic_source(options, 1);
  EXPECT_EQ(source->max_length(), 256);
  EXPECT_EQ(source->read(1000).tokens.size(), 64u);
  EXPECT_FALSE(source->observe(79, 100, 10));
  EXPECT_TRUE(source->observe(100, 100, 32));
  EXPECT_EQ(source->read(31).tokens.size(), 64u);
  EXPECT_EQ(source->read(32).tokens.size(), 128u);
  auto resumed = make_synthetic_source(options, 1);
  resumed->restore_state(source->state());
  for (uint64_t p : {0u, 31u, 32u, 500u}) EXPECT_EQ(resumed->read(p).tokens, source->read(p).tokens);
  options.curriculum.reset();
  EXPECT_THROW(make_synthetic_source(options, 1)->restore_state(source->state()), UserError);
}

// The question's key, the marker and the value, found by reading the sequence as a careful reader would.
TEST(Synthetic, NeedlesAreFoundByAReaderOfTheWholeSequence) {
  SyntheticOptions options = options_for(SyntheticTask::needle_multi_key, 1024);
  options.value_tokens = 3;
  const auto source = make_synthetic_source(options, 9);
  for (uint64_t position = 0; position < 20; ++position) {
    const TokenSequence s = source->read(position);
    const size_t question = s.tokens.size() - 5;
    ASSERT_EQ(s.tokens[question], 1);
    const int32_t key = s.tokens[question + 1];
    int found = 0;
    for (size_t i = 0; i < question; ++i)
      if (s.tokens[i] == 2 && s.tokens[i + 1] == key) {
        ++found;
        EXPECT_LE(i + 5, question - 256);
        EXPECT_TRUE(std::equal(s.tokens.begin() + static_cast<int64_t>(i) + 2,
                               s.tokens.begin() + static_cast<int64_t>(i) + 5, s.tokens.end() - 3));
      }
    EXPECT_EQ(found, 1);
    EXPECT_EQ(std::count(s.tokens.begin(), s.tokens.end(), 2), 4);
  }
}

TEST(Synthetic, DepthPlacesTheNeedle) {
  SyntheticOptions options = options_for(SyntheticTask::needle_single, 1000);
  options.min_distance = 100;
  for (double depth : {0.0, 0.5, 1.0}) {
    options.depth = depth;
    const TokenSequence s = make_synthetic_source(options, 2)->read(0);
    const auto at = std::find(s.tokens.begin(), s.tokens.end(), 2) - s.tokens.begin();
    // 1000 tokens less a gap of 100, the question and answer (3) and the needle (3).
    EXPECT_EQ(at, std::llround(depth * 894));
  }
}

TEST(Synthetic, VariableChainsLeadToTheAnswer) {
  const auto source = make_synthetic_source(options_for(SyntheticTask::variable_tracking, 1024), 4);
  for (uint64_t position = 0; position < 20; ++position) {
    const TokenSequence s = source->read(position);
    const size_t question = s.tokens.size() - 7;
    std::map<int32_t, int32_t> held;  // variable -> value, assignments executed in order
    std::vector<int32_t> order;
    for (size_t i = 0; i < question; ++i)
      if (s.tokens[i] == 3) {
        const int32_t right = s.tokens[i + 3];
        held[s.tokens[i + 1]] = held.count(right) ? held[right] : right;
        order.push_back(s.tokens[i + 1]);
      }
    ASSERT_EQ(order.size(), 10u);
    std::vector<int32_t> answer;
    for (int32_t name : order)
      if (held[name] == s.tokens[question + 1]) answer.push_back(name);
    EXPECT_EQ(answer, std::vector<int32_t>(s.tokens.end() - 5, s.tokens.end()));
  }
}

TEST(Synthetic, CountingTasksHaveOneRightAnswer) {
  for (SyntheticTask task : {SyntheticTask::common_words, SyntheticTask::frequent_words})
    for (int64_t length : {300, 2048, 20000}) {
      const TokenSequence s = make_synthetic_source(options_for(task, length), 5)->read(1);
      const std::vector<int32_t> answer(s.tokens.end() - 4, s.tokens.end());
      std::map<int32_t, int64_t> counts;
      for (size_t i = 0; i + 5 < s.tokens.size(); ++i)
        if (s.tokens[i] >= 72 && s.tokens[i] < 136) ++counts[s.tokens[i]];  // the range of words: (200 - 8) / 3 = 64
      std::vector<std::pair<int64_t, int32_t>> ranked;
      for (auto [word, count] : counts) ranked.push_back({-count, word});
      std::sort(ranked.begin(), ranked.end());
      ASSERT_GT(ranked.size(), 4u);
      EXPECT_LT(ranked[3].first, ranked[4].first) << "the fourth is more frequent than the fifth";
      std::set<int32_t> best;
      for (int i = 0; i < 4; ++i) best.insert(ranked[static_cast<size_t>(i)].second);
      EXPECT_EQ(best, std::set<int32_t>(answer.begin(), answer.end()));
      if (task == SyntheticTask::frequent_words) {
        for (int i = 0; i < 4; ++i) EXPECT_EQ(ranked[static_cast<size_t>(i)].second, answer[static_cast<size_t>(i)]);
      }
    }
}

TEST(Synthetic, LengthDistributionsStayInsideAndReachTheEnds) {
  std::set<int64_t> seen;
  const auto uniform = LengthDistribution::uniform(10, 13);
  for (uint64_t p = 0; p < 200; ++p) seen.insert(uniform.at(1, p));
  EXPECT_EQ(seen, (std::set<int64_t>{10, 11, 12, 13}));
  const auto spread = LengthDistribution::log_uniform(16, 4096);
  int below_256 = 0;
  for (uint64_t p = 0; p < 2000; ++p) {
    ASSERT_GE(spread.at(1, p), 16);
    ASSERT_LE(spread.at(1, p), 4096);
    below_256 += spread.at(1, p) < 256;
  }
  EXPECT_NEAR(below_256, 1000, 100);  // 256 is the geometric middle
  seen.clear();
  const auto pool = LengthDistribution::from_pool({100, 7, 100});
  for (uint64_t p = 0; p < 50; ++p) seen.insert(pool.at(1, p));
  EXPECT_EQ(seen, (std::set<int64_t>{7, 100}));
}

TEST(Synthetic, RefusesWhatCannotBeMade) {
  EXPECT_THROW(parse_synthetic_task("needle"), UserError);
  EXPECT_THROW(make_synthetic_source(options_for(SyntheticTask::chunk_recall, 15), 1), UserError);
  EXPECT_NO_THROW(make_synthetic_source(options_for(SyntheticTask::chunk_recall, 16), 1));
  EXPECT_THROW(make_synthetic_source(options_for(SyntheticTask::needle_multi_key, 2048, 19), 1), UserError);
  // A needle of 3, a gap of length / 4, a question and answer of 3.
  EXPECT_THROW(make_synthetic_source(options_for(SyntheticTask::needle_single, 6), 1), UserError);
  EXPECT_NO_THROW(make_synthetic_source(options_for(SyntheticTask::needle_single, 7), 1));
  SyntheticOptions options = options_for(SyntheticTask::associative_recall, 2048);
  options.queries = 5;
  EXPECT_THROW(make_synthetic_source(options, 1), UserError);
  options = options_for(SyntheticTask::chunk_recall, 2048);
  options.min_distance = 512;
  EXPECT_THROW(make_synthetic_source(options, 1), UserError);
  options.length = LengthDistribution::from_pool({});
  EXPECT_THROW(make_synthetic_source(options, 1), UserError);
}

// The shortest length each task accepts really works.
TEST(Synthetic, TheLeastLengthWorks) {
  for (SyntheticTask task : all_tasks()) {
    int64_t length = 2;
    std::unique_ptr<SequenceSource> source;
    while (!source) {
      try {
        source = make_synthetic_source(options_for(task, ++length), 1);
      } catch (const UserError&) {
        ASSERT_LT(length, 2000);
      }
    }
    for (uint64_t p = 0; p < 20; ++p) EXPECT_EQ(static_cast<int64_t>(source->read(p).tokens.size()), length);
  }
}

// Guesses the next token from the last `window` tokens: what followed the longest suffix seen before in the window.
int32_t suffix_guess(std::span<const int32_t> context, int64_t window) {
  if (static_cast<int64_t>(context.size()) > window)
    context = context.subspan(context.size() - static_cast<size_t>(window));
  size_t best = 0;
  int32_t guess = -1;
  for (size_t end = 1; end < context.size(); ++end) {
    size_t same = 0;
    while (same < end && context[end - 1 - same] == context[context.size() - 1 - same]) ++same;
    if (same > 0 && same >= best) {
      best = same;
      guess = context[end];
    }
  }
  return guess;
}

int32_t most_frequent(std::span<const int32_t> context, int64_t window, const std::set<int32_t>& candidates) {
  if (static_cast<int64_t>(context.size()) > window)
    context = context.subspan(context.size() - static_cast<size_t>(window));
  std::map<int32_t, int> counts;
  for (int32_t token : context)
    if (candidates.count(token)) ++counts[token];
  int32_t best = -1;
  for (auto [token, count] : counts)
    if (best < 0 || count > counts[best]) best = token;
  return best;
}

struct Scores {
  int64_t targets = 0, suffix = 0, frequent = 0, usual = 0;
};

// Three guessers: by the longest suffix, the most frequent candidate in the window, and the answer most often right so
// far at this place of the answer.
Scores score_guessers(const SequenceSource& source, uint64_t sequences, int64_t window) {
  Scores scores;
  std::set<int32_t> candidates;
  std::map<int64_t, std::map<int32_t, int64_t>> history;
  for (uint64_t position = 0; position < sequences; ++position) {
    const TokenSequence s = source.read(position);
    int64_t place = 0;
    for (size_t i = 0; i < s.tokens.size(); ++i) {
      if (s.labels[i] == kIgnoredLabel) continue;
      const std::span<const int32_t> context(s.tokens.data(), i + 1);
      ++scores.targets;
      scores.suffix += suffix_guess(context, window) == s.labels[i];
      scores.frequent += most_frequent(context, window, candidates) == s.labels[i];
      auto& seen = history[place % 64];
      const auto usual =
          std::max_element(seen.begin(), seen.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
      scores.usual += usual != seen.end() && usual->first == s.labels[i];
      ++seen[s.labels[i]];
      ++place;
    }
    for (int32_t label : s.labels)
      if (label != kIgnoredLabel) candidates.insert(label);
  }
  return scores;
}

TEST(Synthetic, TheLast512TokensTellNothing) {
  for (SyntheticTask task : all_tasks()) {
    SCOPED_TRACE(std::string(synthetic_task_name(task)));
    const bool recall = task == SyntheticTask::chunk_recall || task == SyntheticTask::copy;
    SyntheticOptions options = options_for(task, recall ? 6000 : 2048);
    if (task == SyntheticTask::chunk_recall) options.min_distance = 512;
    const auto source = make_synthetic_source(options, 21);
    const Scores scores = score_guessers(*source, recall ? 2 : 600, 512);
    // Answers are one of 64 (one of 200 for the recall tasks); words and variables never repeat within an answer, which
    // leaves at least 60.
    const double chance = recall ? 1.0 / 200 : 1.0 / 60, n = static_cast<double>(scores.targets);
    const double bound = n * chance + 5.0 * std::sqrt(n * chance);
    EXPECT_GE(n, 600);
    EXPECT_LE(static_cast<double>(scores.suffix), bound);
    EXPECT_LE(static_cast<double>(scores.frequent), bound);
    EXPECT_LE(static_cast<double>(scores.usual), bound);
  }
}

// The same guessers succeed when they may see everything, or when nothing keeps the answer away: the test above can
// fail.
TEST(Synthetic, TheGuessersFindWhatIsThere) {
  const Scores needle =
      score_guessers(*make_synthetic_source(options_for(SyntheticTask::needle_single, 2048), 1), 50, 4096);
  EXPECT_GE(needle.suffix, 48);
  SyntheticOptions near = options_for(SyntheticTask::chunk_recall, 600);
  EXPECT_GE(score_guessers(*make_synthetic_source(near, 1), 4, 512).suffix, 600);
  SyntheticOptions words = options_for(SyntheticTask::common_words, 700);
  words.min_distance = 0;
  EXPECT_GE(score_guessers(*make_synthetic_source(words, 1), 50, 512).frequent, 20);
}

}  // namespace
}  // namespace sb
