#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "data/synthetic/synthetic_tasks.h"

// Layout of a sequence: body (noise with the facts in it), gap (noise), question, answer. The gap keeps everything that
// helps at least min_distance away from the question.
namespace sb::synthetic {
namespace {

// Token ids: a few markers, then three equal ranges for noise, keys (also variables and words) and values, so that what
// a token is can be told from the token while which one it is cannot.
enum Marker : int32_t { kQuery = 1, kNeedle = 2, kAssign = 3, kHolds = 4, kMarkers = 8 };

struct Ranges {
  explicit Ranges(int64_t vocab_size) : size((vocab_size - kMarkers) / 3) {}
  int64_t size;

  int64_t noise(Random& random) const { return kMarkers + draw(random); }
  int64_t key(int64_t i) const { return kMarkers + size + i; }
  int64_t value(Random& random) const { return kMarkers + 2 * size + draw(random); }

 private:
  int64_t draw(Random& random) const { return static_cast<int64_t>(random.below(static_cast<uint64_t>(size))); }
};

using Tokens = std::vector<int64_t>;

// Facts to hide, in this order, and what stands after the gap.
struct Content {
  std::vector<Tokens> facts;
  Draft tail;
};

template <typename T>
void shuffle(std::vector<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

// `count` different keys in random order (partial Fisher–Yates).
Tokens distinct_keys(const Ranges& ranges, int64_t count, Random& random) {
  Tokens all(static_cast<size_t>(ranges.size));
  for (size_t i = 0; i < all.size(); ++i) all[i] = ranges.key(static_cast<int64_t>(i));
  for (int64_t i = 0; i < count; ++i)
    std::swap(all[static_cast<size_t>(i)],
              all[static_cast<size_t>(i) + random.below(static_cast<uint64_t>(ranges.size - i))]);
  all.resize(static_cast<size_t>(count));
  return all;
}

Tokens draw_value(const SyntheticOptions& options, const Ranges& ranges, Random& random) {
  Tokens value(static_cast<size_t>(options.value_tokens));
  for (int64_t& token : value) token = ranges.value(random);
  return value;
}

// The answer follows the key at once, as the value does in the fact: a model that has learned to continue what it has
// seen before can answer.
void ask(Draft& tail, int64_t about, const Tokens& answer) {
  tail.add(kQuery);
  tail.add(about);
  for (int64_t token : answer) tail.add(token, true);
}

Content make_needles(const SyntheticOptions& options, const Ranges& ranges, Random& random) {
  const bool multi_value = options.task == SyntheticTask::needle_multi_value;
  const bool pairs = options.task == SyntheticTask::associative_recall;
  const int64_t keys = options.task == SyntheticTask::needle_single || multi_value ? 1 : options.needles;
  const int64_t asked = options.task == SyntheticTask::needle_multi_query || pairs ? options.queries : 1;
  const Tokens names = distinct_keys(ranges, keys, random);
  Content content;
  std::vector<Tokens> answers(names.size());
  for (size_t k = 0; k < names.size(); ++k)
    for (int64_t v = 0; v < (multi_value ? options.values : 1); ++v) {
      const Tokens value = draw_value(options, ranges, random);
      Tokens fact = pairs ? Tokens{names[k]} : Tokens{kNeedle, names[k]};
      fact.insert(fact.end(), value.begin(), value.end());
      content.facts.push_back(std::move(fact));
      answers[k].insert(answers[k].end(), value.begin(), value.end());
    }
  // The names are in random order, so the first ones are a random choice; the facts get their own order.
  for (size_t k = 0; k < static_cast<size_t>(asked); ++k) ask(content.tail, names[k], answers[k]);
  if (!multi_value) shuffle(content.facts, random);
  return content;
}

Content make_chains(const SyntheticOptions& options, const Ranges& ranges, Random& random) {
  const int64_t links = options.hops + 1;
  const Tokens names = distinct_keys(ranges, options.chains * links, random);
  Tokens values;
  while (static_cast<int64_t>(values.size()) < options.chains) {
    const int64_t value = ranges.value(random);
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  }
  // Each entry of the order says which chain gets its next link, so that chains interleave and links stay in order.
  std::vector<int64_t> order;
  for (int64_t c = 0; c < options.chains; ++c) order.insert(order.end(), static_cast<size_t>(links), c);
  shuffle(order, random);
  Content content;
  std::vector<int64_t> next(static_cast<size_t>(options.chains), 0);
  for (int64_t c : order) {
    const auto chain = static_cast<size_t>(c);
    const auto at = static_cast<size_t>(c * links + next[chain]++);
    content.facts.push_back({kAssign, names[at], kHolds, next[chain] == 1 ? values[chain] : names[at - 1]});
  }
  ask(content.tail, values[0], Tokens(names.begin(), names.begin() + links));
  return content;
}

// How often each word of the two counting tasks occurs in a body of this size; the words asked for come first.
std::vector<int64_t> word_counts(const SyntheticOptions& options, int64_t body, int64_t words) {
  const int64_t answers = options.answers;
  std::vector<int64_t> counts;
  if (options.task == SyntheticTask::common_words) {
    const int64_t rare_words = std::min(words - answers, body - 10 * answers);
    const int64_t repeats = std::max<int64_t>(1, body / (rare_words + 10 * answers));
    counts.assign(static_cast<size_t>(answers), 10 * repeats);
    counts.insert(counts.end(), static_cast<size_t>(rare_words), repeats);
    return counts;
  }
  for (int64_t rank = 1; rank <= words; ++rank) {
    const int64_t count = body / 2 / (rank * rank);
    if (count == 0) break;
    counts.push_back(count);
  }
  return counts;
}

Content make_words(const SyntheticOptions& options, const Ranges& ranges, int64_t body, Random& random) {
  const std::vector<int64_t> counts = word_counts(options, body, ranges.size);
  const Tokens words = distinct_keys(ranges, static_cast<int64_t>(counts.size()), random);
  Tokens text;
  for (size_t w = 0; w < words.size(); ++w) text.insert(text.end(), static_cast<size_t>(counts[w]), words[w]);
  shuffle(text, random);
  Tokens answer(words.begin(), words.begin() + options.answers);
  // Equally common words are asked for in the order of their first occurrence: any other order would tell about them.
  if (options.task == SyntheticTask::common_words)
    std::sort(answer.begin(), answer.end(), [&](int64_t a, int64_t b) {
      return std::find(text.begin(), text.end(), a) < std::find(text.begin(), text.end(), b);
    });
  Content content;
  for (int64_t token : text) content.facts.push_back({token});
  content.tail.add(kQuery);
  for (int64_t token : answer) content.tail.add(token, true);
  return content;
}

bool counts_words(SyntheticTask task) {
  return task == SyntheticTask::common_words || task == SyntheticTask::frequent_words;
}

struct Sizes {
  int64_t facts = 0, tail = 0, keys = 0, targets = 0;
};

Sizes fixed_sizes(const SyntheticOptions& o) {
  switch (o.task) {
    case SyntheticTask::needle_single:
      return {2 + o.value_tokens, 2 + o.value_tokens, 1, o.value_tokens};
    case SyntheticTask::needle_multi_key:
      return {o.needles * (2 + o.value_tokens), 2 + o.value_tokens, o.needles, o.value_tokens};
    case SyntheticTask::needle_multi_value:
      return {o.values * (2 + o.value_tokens), 2 + o.values * o.value_tokens, 1, o.values * o.value_tokens};
    case SyntheticTask::needle_multi_query:
      return {o.needles * (2 + o.value_tokens), o.queries * (2 + o.value_tokens), o.needles,
              o.queries * o.value_tokens};
    case SyntheticTask::associative_recall:
      return {o.needles * (1 + o.value_tokens), o.queries * (2 + o.value_tokens), o.needles,
              o.queries * o.value_tokens};
    case SyntheticTask::variable_tracking:
      return {4 * o.chains * (o.hops + 1), 2 + o.hops + 1, o.chains * (o.hops + 1), o.hops + 1};
    case SyntheticTask::common_words:
      return {11 * o.answers, 1 + o.answers, 2 * o.answers, o.answers};
    case SyntheticTask::frequent_words:
      return {2 * o.answers * (o.answers + 1) * (o.answers + 1), 1 + o.answers, o.answers + 1, o.answers};
    default:
      throw InternalError("not a retrieval task: {}", static_cast<int>(o.task));
  }
}

}  // namespace

void check_retrieval(const SyntheticOptions& options, int64_t length) {
  const std::string_view name = synthetic_task_name(options.task);
  for (const auto& [key, value] :
       {std::pair{"needles", options.needles}, std::pair{"values", options.values},
        std::pair{"queries", options.queries}, std::pair{"value_tokens", options.value_tokens},
        std::pair{"hops", options.hops}, std::pair{"chains", options.chains}, std::pair{"answers", options.answers}})
    SB_USER_CHECK(value >= 1 && value <= 1 << 20, "{}: {} must lie between 1 and 2^20, got {}", name, key, value);
  const bool asks_several =
      options.task == SyntheticTask::needle_multi_query || options.task == SyntheticTask::associative_recall;
  SB_USER_CHECK(!asks_several || options.queries <= options.needles, "{}: queries ({}) must not exceed needles ({})",
                name, options.queries, options.needles);
  SB_USER_CHECK(options.depth <= 1.0, "{}: depth must lie between 0 and 1, got {}", name, options.depth);
  SB_USER_CHECK(options.depth < 0.0 || options.task == SyntheticTask::needle_single,
                "{}: depth applies to needle_single only", name);
  const Sizes sizes = fixed_sizes(options);
  const int64_t keys = std::max(sizes.keys, options.chains);
  SB_USER_CHECK(options.vocab_size >= kMarkers + 3 * std::max<int64_t>(keys, 2),
                "{}: vocab_size {} is too small for {} different keys; use {} or more", name, options.vocab_size, keys,
                kMarkers + 3 * std::max<int64_t>(keys, 2));
  const int64_t needed = sizes.facts + sizes.tail + resolved_min_distance(options, length);
  SB_USER_CHECK(length >= needed, "{}: length {} is too short, these options need {} or more", name, length, needed);
}

int64_t count_retrieval_targets(const SyntheticOptions& options) {
  return fixed_sizes(options).targets;
}

Draft make_retrieval(const SyntheticOptions& options, int64_t length, Random& random) {
  const Ranges ranges(options.vocab_size);
  const int64_t gap = resolved_min_distance(options, length);
  const int64_t body = length - gap - fixed_sizes(options).tail;
  const Content content = counts_words(options.task)                         ? make_words(options, ranges, body, random)
                          : options.task == SyntheticTask::variable_tracking ? make_chains(options, ranges, random)
                                                                             : make_needles(options, ranges, random);
  int64_t fact_tokens = 0;
  for (const Tokens& fact : content.facts) fact_tokens += static_cast<int64_t>(fact.size());
  const int64_t noise = body - fact_tokens;
  SB_CHECK(noise >= 0, "facts of {} tokens in a body of {}", fact_tokens, body);
  // A fact stands before the i-th noise token, i drawn uniformly; sorting keeps the facts' own order.
  Tokens places(content.facts.size());
  for (int64_t& place : places) place = static_cast<int64_t>(random.below(static_cast<uint64_t>(noise + 1)));
  if (options.depth >= 0.0) places.front() = std::llround(options.depth * static_cast<double>(noise));
  std::sort(places.begin(), places.end());

  Draft draft;
  draft.tokens.reserve(static_cast<size_t>(length));
  draft.answer.reserve(static_cast<size_t>(length));
  size_t next = 0;
  for (int64_t i = 0; i <= noise; ++i) {
    for (; next < places.size() && places[next] == i; ++next)
      for (int64_t token : content.facts[next]) draft.add(token);
    if (i < noise) draft.add(ranges.noise(random));
  }
  for (int64_t i = 0; i < gap; ++i) draft.add(ranges.noise(random));
  for (size_t i = 0; i < content.tail.tokens.size(); ++i) draft.add(content.tail.tokens[i], content.tail.answer[i]);
  return draft;
}

}  // namespace sb::synthetic
