#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace sb {

// RULER's task families over text (Hsieh et al., 2024), in its prompts and its JSONL layout. The families that need
// other people's question sets (qa_1, qa_2) are not among them. Unlike in the original, nothing that helps stands in
// the last `min_distance_words` words before the question.
enum class RulerTask { niah_single, niah_multikey, niah_multivalue, niah_multiquery, vt, cwe, fwe };

RulerTask parse_ruler_task(std::string_view name);
std::string_view ruler_task_name(RulerTask task);
std::vector<std::string_view> ruler_task_names();

struct RulerOptions {
  RulerTask task = RulerTask::niah_single;
  int64_t length = 4096;             // tokens of the prompt and the answer together, at most and nearly
  int64_t needles = 4;               // niah_multikey, niah_multiquery: keys; niah_multivalue: values
  int64_t queries = 4;               // niah_multiquery: keys asked for
  int64_t hops = 4, chains = 1;      // vt
  int64_t common_words = 10;         // cwe
  int64_t min_distance_words = 512;  // reduced to a quarter of the words for short prompts
  double depth = -1.0;               // niah_single: 0 (start) to 1 (end); negative: random
};

struct RulerSample {
  int64_t index = 0;
  std::string input;
  std::vector<std::string> outputs;
  int64_t length = 0;  // tokens of the input, and of the answer RULER allows for
};

// How many tokens a text has; words when there is no tokenizer.
using TokenCounter = std::function<int64_t(std::string_view)>;
int64_t count_words(std::string_view text);

// A pure function of (options, seed, index). Throws UserError when the length is too short for the task.
RulerSample make_ruler_sample(const RulerOptions& options, const TokenCounter& count_tokens, uint64_t seed,
                              int64_t index);

// One line {"index", "input", "outputs", "length"}, without the line end.
std::string ruler_jsonl(const RulerSample& sample);

}  // namespace sb
