#include "data/synthetic/ruler_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

using Strings = std::vector<std::string>;

constexpr std::pair<RulerTask, std::string_view> kRulerNames[] = {{RulerTask::niah_single, "niah_single"},
                                                                  {RulerTask::niah_multikey, "niah_multikey"},
                                                                  {RulerTask::niah_multivalue, "niah_multivalue"},
                                                                  {RulerTask::niah_multiquery, "niah_multiquery"},
                                                                  {RulerTask::vt, "vt"},
                                                                  {RulerTask::cwe, "cwe"},
                                                                  {RulerTask::fwe, "fwe"}};

// Tokens RULER lets a model answer with.
int64_t answer_tokens(RulerTask task) {
  switch (task) {
    case RulerTask::vt:
      return 30;
    case RulerTask::cwe:
      return 120;
    case RulerTask::fwe:
      return 50;
    default:
      return 128;
  }
}

constexpr const char* kNoise[] = {"The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
                                  "There and back again."};

template <typename T>
void shuffle(std::vector<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

std::string random_letters(Random& random, uint64_t letters, char first) {
  std::string word;
  for (uint64_t i = 0; i < letters; ++i) word += static_cast<char>(first + static_cast<char>(random.below(26)));
  return word;
}

// Pronounceable words, all different.
Strings distinct_words(Random& random, size_t count) {
  const std::string consonants = "bcdfghjklmnprstvwz", vowels = "aeiou";
  std::set<std::string> seen;
  Strings words;
  while (words.size() < count) {
    std::string word;
    for (uint64_t i = 0, syllables = 2 + random.below(3); i < syllables; ++i) {
      word += consonants[random.below(consonants.size())];
      word += vowels[random.below(vowels.size())];
    }
    if (seen.insert(word).second) words.push_back(word);
  }
  return words;
}

std::string join(const Strings& parts, const char* separator) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += separator;
    text += parts[i];
  }
  return text;
}

// "a", "a and b", "a, b, and c".
std::string enumerate(const Strings& parts) {
  if (parts.size() < 3) return join(parts, " and ");
  return join(Strings(parts.begin(), parts.end() - 1), ", ") + ", and " + parts.back();
}

// A prompt whose haystack of `units` units (sentences or words) is still to be chosen.
struct Prompt {
  std::string text;
  Strings outputs;
};

// Sentences of noise with facts between them, in order; the last `quiet` sentences are noise only.
std::string hide(const Strings& facts, int64_t units, int64_t quiet, double depth, Random& random) {
  const int64_t open = units - quiet;
  std::vector<int64_t> places(facts.size());
  for (int64_t& place : places) place = static_cast<int64_t>(random.below(static_cast<uint64_t>(open + 1)));
  if (depth >= 0.0) places.front() = std::llround(depth * static_cast<double>(open));
  std::sort(places.begin(), places.end());
  std::string text;
  size_t next = 0;
  const auto add = [&](const std::string& sentence) {
    if (!text.empty()) text += ' ';
    text += sentence;
  };
  for (int64_t i = 0; i <= units; ++i) {
    for (; next < places.size() && places[next] == i; ++next) add(facts[next]);
    if (i < units) add(kNoise[i % 5]);
  }
  return text;
}

constexpr double kWordsPerNoise = 3.6;  // 18 words in the five sentences

int64_t quiet_units(int64_t wanted_words, int64_t units, double words_per_unit) {
  const auto wanted = static_cast<int64_t>(std::ceil(static_cast<double>(wanted_words) / words_per_unit));
  return std::min(wanted, units / 4);
}

Prompt make_niah(const RulerOptions& o, int64_t units, Random& random) {
  const bool multivalue = o.task == RulerTask::niah_multivalue, multiquery = o.task == RulerTask::niah_multiquery;
  const auto keys = static_cast<size_t>(o.task == RulerTask::niah_single || multivalue ? 1 : o.needles);
  const Strings words = distinct_words(random, 2 * keys);
  Strings facts, asked;
  Prompt prompt;
  for (size_t k = 0; k < keys; ++k) {
    const std::string key = words[2 * k] + "-" + words[2 * k + 1];
    const bool is_asked = k < static_cast<size_t>(multiquery ? o.queries : 1);
    if (is_asked) asked.push_back(key);
    for (int64_t v = 0; v < (multivalue ? o.needles : 1); ++v) {
      const std::string value = std::to_string(1000000 + random.below(9000000));
      facts.push_back("One of the special magic numbers for " + key + " is: " + value + ".");
      if (is_asked) prompt.outputs.push_back(value);
    }
  }
  shuffle(facts, random);
  const bool several = prompt.outputs.size() > 1;
  const std::string numbers = several ? "numbers" : "number", query = enumerate(asked);
  prompt.text = fmt::format(
      "{} hidden within the following text. Make sure to memorize it. I will quiz you about the {} afterwards.\n{}\n"
      "What {} special magic {} for {} mentioned in the provided text? The special magic {} for {} mentioned in the "
      "provided text {}",
      several ? "Some special magic numbers are" : "A special magic number is", numbers,
      hide(facts, units, quiet_units(o.min_distance_words, units, kWordsPerNoise), o.depth, random),
      several ? "are all the" : "is the", numbers, query, numbers, query, several ? "are" : "is");
  return prompt;
}

Prompt make_vt(const RulerOptions& o, int64_t units, Random& random) {
  std::set<std::string> names;
  std::vector<Strings> chains(static_cast<size_t>(o.chains));
  Strings values;
  for (Strings& chain : chains) {
    while (chain.size() <= static_cast<size_t>(o.hops)) {
      const std::string name = random_letters(random, 5, 'A');
      if (names.insert(name).second) chain.push_back(name);
    }
    std::string value;
    do value = std::to_string(10000 + random.below(90000));
    while (!names.insert(value).second);
    values.push_back(value);
  }
  std::vector<size_t> order;
  for (size_t c = 0; c < chains.size(); ++c) order.insert(order.end(), chains[c].size(), c);
  shuffle(order, random);
  std::vector<size_t> next(chains.size(), 0);
  Strings facts;
  for (size_t c : order) {
    const size_t i = next[c]++;
    facts.push_back("VAR " + chains[c][i] + " = " + (i == 0 ? values[c] : "VAR " + chains[c][i - 1]));
  }
  return {
      fmt::format("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{}\n"
                  "Question: Find all variables that are assigned the value {} in the text above. Answer: According "
                  "to the chain(s) of variable assignment in the text above, {} variables are assigned the value {}, "
                  "they are: ",
                  hide(facts, units, quiet_units(o.min_distance_words, units, kWordsPerNoise), -1.0, random), values[0],
                  chains[0].size(), values[0]),
      chains[0]};
}

// Units are words of the list. The common ones occur often, the rare ones a tenth as often; the quiet end of the list
// holds words that occur nowhere else.
Prompt make_cwe(const RulerOptions& o, int64_t units, Random& random) {
  const int64_t quiet = quiet_units(o.min_distance_words / 2, units, 1.0), open = units - quiet;
  const int64_t repeats = std::max<int64_t>(1, open / (20 * o.common_words));
  const int64_t often = 10 * repeats, rare_words = (open - o.common_words * often) / repeats;
  const Strings words =
      distinct_words(random, static_cast<size_t>(o.common_words + std::max<int64_t>(rare_words, 0) + quiet));
  Strings list;
  for (int64_t w = 0; w < o.common_words + rare_words; ++w)
    list.insert(list.end(), static_cast<size_t>(w < o.common_words ? often : repeats), words[static_cast<size_t>(w)]);
  shuffle(list, random);
  list.insert(list.end(), words.end() - quiet, words.end());
  std::string text;
  for (size_t i = 0; i < list.size(); ++i) text += fmt::format("{}{}. {}", i > 0 ? " " : "", i + 1, list[i]);
  return {
      fmt::format("Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
                  "ones that appear most often.\n{}\nQuestion: What are the {} most common words in the above list? "
                  "Answer: The top {} words that appear most often in the list are:",
                  text, o.common_words, o.common_words),
      Strings(words.begin(), words.begin() + o.common_words)};
}

// Units are coded words, frequencies falling with the square of the rank; the quiet end holds words of its own.
Prompt make_fwe(const RulerOptions& o, int64_t units, Random& random) {
  const int64_t quiet = quiet_units(o.min_distance_words, units, 1.0), open = units - quiet;
  Strings coded, list;
  std::set<std::string> seen;
  const auto fresh = [&] {
    std::string word;
    do word = random_letters(random, 6, 'a');
    while (!seen.insert(word).second);
    return word;
  };
  for (int64_t rank = 1; open / 2 / (rank * rank) > 0; ++rank) {
    coded.push_back(fresh());
    list.insert(list.end(), static_cast<size_t>(open / 2 / (rank * rank)), coded.back());
  }
  while (static_cast<int64_t>(list.size()) < open) list.push_back("...");
  shuffle(list, random);
  for (int64_t i = 0; i < quiet; ++i) list.push_back(fresh());
  return {
      "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
      "appeared coded words. " +
          join(list, " ") +
          "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
          "frequently appeared words in the above coded text? Answer: According to the coded text above, the three "
          "most frequently appeared words are:",
      Strings(coded.begin(), coded.begin() + 3)};
}

Prompt make_prompt(const RulerOptions& o, int64_t units, Random random) {
  switch (o.task) {
    case RulerTask::vt:
      return make_vt(o, units, random);
    case RulerTask::cwe:
      return make_cwe(o, units, random);
    case RulerTask::fwe:
      return make_fwe(o, units, random);
    default:
      return make_niah(o, units, random);
  }
}

// Fewer units would break the task's promise (the common words would not stand out).
int64_t least_units(const RulerOptions& o) {
  if (o.task == RulerTask::cwe) return 4 * 11 * o.common_words / 3 + 4;
  if (o.task == RulerTask::fwe) return 4 * 100 / 3 + 4;
  return 5;
}

void check(const RulerOptions& o) {
  const std::string_view name = ruler_task_name(o.task);
  for (const auto& [key, value] :
       {std::pair{"needles", o.needles}, std::pair{"queries", o.queries}, std::pair{"hops", o.hops},
        std::pair{"chains", o.chains}, std::pair{"common_words", o.common_words}})
    SB_USER_CHECK(value >= 1 && value <= 1000, "{}: {} must lie between 1 and 1000, got {}", name, key, value);
  SB_USER_CHECK(o.task != RulerTask::niah_multiquery || o.queries <= o.needles,
                "{}: queries ({}) must not exceed needles ({})", name, o.queries, o.needles);
  SB_USER_CHECK(o.min_distance_words >= 0, "{}: the distance must not be negative", name);
  SB_USER_CHECK(o.depth <= 1.0 && (o.depth < 0.0 || o.task == RulerTask::niah_single),
                "{}: depth must lie between 0 and 1, and applies to niah_single only", name);
}

}  // namespace

RulerTask parse_ruler_task(std::string_view name) {
  for (const auto& [task, known] : kRulerNames)
    if (known == name) return task;
  throw UserError("unknown RULER task \"{}\"; choose from {}", name, fmt::join(ruler_task_names(), ", "));
}

std::string_view ruler_task_name(RulerTask task) {
  for (const auto& [known, name] : kRulerNames)
    if (known == task) return name;
  throw InternalError("no such task: {}", static_cast<int>(task));
}

std::vector<std::string_view> ruler_task_names() {
  std::vector<std::string_view> names;
  for (const auto& entry : kRulerNames) names.push_back(entry.second);
  return names;
}

int64_t count_words(std::string_view text) {
  int64_t words = 0;
  bool inside = false;
  for (char c : text) {
    const bool space = std::isspace(static_cast<unsigned char>(c)) != 0;
    words += inside && space;
    inside = !space;
  }
  return words + inside;
}

RulerSample make_ruler_sample(const RulerOptions& options, const TokenCounter& count_tokens, uint64_t seed,
                              int64_t index) {
  check(options);
  const Random random(seed, static_cast<uint64_t>(index));
  const int64_t room = options.length - answer_tokens(options.task);
  const auto tokens_with = [&](int64_t units) { return count_tokens(make_prompt(options, units, random).text); };
  const int64_t least = least_units(options);
  const int64_t shortest = tokens_with(least);
  SB_USER_CHECK(shortest <= room,
                "{}: a length of {} is too short: the shortest prompt takes {} tokens and the answer {}",
                ruler_task_name(options.task), options.length, shortest, answer_tokens(options.task));
  // Prompts grow by nearly equal steps: a few secant steps come close, and none of them overshoots for long.
  int64_t low = least, low_tokens = shortest, high = 0;
  for (int step = 0; step < 24 && (high == 0 || high - low > 1); ++step) {
    const int64_t probe_from = low == least ? 0 : least;
    const double per_unit = probe_from == 0
                                ? static_cast<double>(tokens_with(2 * least) - shortest) / static_cast<double>(least)
                                : static_cast<double>(low_tokens - shortest) / static_cast<double>(low - least);
    int64_t guess = low + static_cast<int64_t>(static_cast<double>(room - low_tokens) / std::max(per_unit, 0.01));
    guess = std::max(guess, low + 1);
    if (high != 0) guess = std::min(guess, high - 1);
    const int64_t tokens = tokens_with(guess);
    if (tokens <= room) {
      // Within half a per cent of the room is near enough; each try makes a whole prompt.
      low = guess;
      low_tokens = tokens;
      if (room - tokens <= room / 200) break;
    } else {
      high = guess;
    }
  }
  Prompt prompt = make_prompt(options, low, random);
  return {index, std::move(prompt.text), std::move(prompt.outputs), low_tokens + answer_tokens(options.task)};
}

std::string ruler_jsonl(const RulerSample& sample) {
  return nlohmann::ordered_json{
      {"index", sample.index}, {"input", sample.input}, {"outputs", sample.outputs}, {"length", sample.length}}
      .dump();
}

}  // namespace sb
