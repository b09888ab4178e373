#include "eval/infinitebench_metrics.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>

#include "core/errors.h"
#include "eval/longbench_metrics.h"
#include "eval/multiple_choice.h"

namespace sb::infinitebench {
namespace {

bool is_digit(char c) {
  return '0' <= c && c <= '9';
}

std::string with_blanks_for(std::string_view text, std::string_view characters) {
  std::string result(text);
  for (char& c : result)
    if (characters.find(c) != std::string_view::npos) c = ' ';
  return result;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

// Runs of digits, in order.
std::vector<std::string> whole_numbers(std::string_view text) {
  std::vector<std::string> numbers;
  for (size_t i = 0; i < text.size(); ++i) {
    if (!is_digit(text[i])) continue;
    if (i == 0 || !is_digit(text[i - 1])) numbers.emplace_back();
    numbers.back() += text[i];
  }
  return numbers;
}

double first_number(std::string_view prediction, const Expected& expected) {
  const std::vector<std::string> numbers = whole_numbers(prediction);
  return !numbers.empty() && numbers.front() == expected.answers.front();
}

constexpr std::string_view kRetrievalMarks = "\n:\"'.,?!{}";

double word_of_the_answer(std::string_view prediction, const Expected& expected) {
  const std::vector<std::string> words = words_of(with_blanks_for(prediction, kRetrievalMarks));
  return std::ranges::find(words, expected.answers.front()) != words.end();
}

double word_in_capitals(std::string_view prediction, const Expected& expected) {
  std::vector<std::string> words = words_of(with_blanks_for(prediction, kRetrievalMarks));
  for (std::string& word : words)
    std::ranges::transform(word, word.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return std::ranges::find(words, expected.answers.front()) != words.end();
}

// The first number, with what follows a point.
double number_found(std::string_view prediction, const Expected& expected) {
  const size_t begin = prediction.find_first_of("0123456789");
  if (begin == std::string_view::npos) return 0;
  size_t end = begin;
  while (end < prediction.size() && is_digit(prediction[end])) ++end;
  if (end + 1 < prediction.size() && prediction[end] == '.' && is_digit(prediction[end + 1])) {
    ++end;
    while (end < prediction.size() && is_digit(prediction[end])) ++end;
  }
  const std::string number(prediction.substr(begin, end - begin));
  return std::strtod(number.c_str(), nullptr) == std::strtod(expected.answers.front().c_str(), nullptr);
}

// How many of the values come in order from the first on.
double values_in_order(std::string_view prediction, const Expected& expected) {
  const std::vector<std::string> numbers = whole_numbers(prediction);
  size_t right = 0;
  while (right < expected.answers.size() && right < numbers.size() &&
         std::strtod(numbers[right].c_str(), nullptr) == std::strtod(expected.answers[right].c_str(), nullptr))
    ++right;
  return static_cast<double>(right) / static_cast<double>(expected.answers.size());
}

double last_word(std::string_view prediction, const Expected& expected) {
  const std::vector<std::string> words = words_of(with_blanks_for(prediction, "\n.`'\":"));
  if (words.empty()) return 0;
  char* end = nullptr;
  const long long value = std::strtoll(words.back().c_str(), &end, 10);
  return *end == 0 && value == std::strtoll(expected.answers.front().c_str(), nullptr, 10);
}

// The right option's text and its letter; older files have both in the answer.
std::pair<std::string, char> right_option(const Expected& expected) {
  const std::string& text = expected.answers.front();
  const auto found = std::ranges::find(expected.options, text);
  if (found != expected.options.end())
    return {text, kChoiceLetters[static_cast<size_t>(found - expected.options.begin())]};
  SB_USER_CHECK(expected.answers.size() == 2 && expected.answers[1].size() == 1 &&
                    kChoiceLetters.find(expected.answers[1]) != std::string_view::npos,
                "the answer \"{}\" is not one of the options", text);
  return {text, expected.answers[1].front()};
}

// What comes right after the first of these, one character (a blank) left out; nothing where there is none.
struct AfterPrefix {
  bool found = false;
  std::string text;
};
AfterPrefix after_prefix(const std::string& text, std::initializer_list<std::string_view> prefixes) {
  for (const std::string_view prefix : prefixes) {
    const size_t at = text.find(prefix);
    if (at == std::string::npos) continue;
    const size_t begin = at + prefix.size() + 1;
    return {true, begin <= text.size() ? text.substr(begin) : ""};
  }
  return {};
}

std::string with_single_blanks(std::string text) {
  text.erase(std::unique(text.begin(), text.end(), [](char a, char b) { return a == ' ' && b == ' '; }), text.end());
  return text;
}

double book_choice(std::string_view prediction, const Expected& expected) {
  const auto [option, letter] = right_option(expected);
  if (prediction.empty()) return 0;
  if (kChoiceLetters.find(prediction.front()) != std::string_view::npos) return prediction.front() == letter;
  const std::string text = with_single_blanks(with_blanks_for(prediction, "\n\"'.,?!{}"));
  const AfterPrefix after = after_prefix(text, {"answer is:", "answer:", "answer is", "option is"});
  if (after.found) return after.text.starts_with(letter) || after.text.starts_with(option);
  for (const std::string& word : words_of(text))
    if (kChoiceLetters.find(word) != std::string_view::npos) return word == std::string(1, letter);
  return 0;
}

// The published script asks for a point or a colon after the letter and calls the letter alone wrong.
double code_choice(std::string_view prediction, const Expected& expected) {
  const auto [option, letter] = right_option(expected);
  if (prediction.starts_with(letter) &&
      (prediction.size() == 1 || std::string_view(".:)\n").find(prediction[1]) != std::string_view::npos))
    return 1;
  std::string text = with_blanks_for(prediction, "\n`'\"-*");
  for (const std::string_view word : {"Option", "option"})
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word))
      text.replace(at, word.size(), 1, ' ');
  const AfterPrefix after = after_prefix(with_single_blanks(text), {"answer is:", "is:", "answer:"});
  return after.text.starts_with(letter) || after.text.starts_with(option);
}

double best(std::string_view prediction, const Expected& expected,
            double (*metric)(std::string_view, std::string_view)) {
  double highest = 0;
  for (const std::string& answer : expected.answers) highest = std::max(highest, metric(prediction, answer));
  return highest;
}

struct Task {
  int64_t answer_tokens;
  bool options;
  std::function<double(std::string_view, const Expected&)> score;
};

// Summaries (longbook_sum_eng) are scored by another ROUGE than LongBench's, which is not here.
const std::map<std::string, Task>& tasks() {
  static const std::map<std::string, Task> table = {
      {"passkey", {6, false, first_number}},
      {"number_string", {12, false, first_number}},
      {"kv_retrieval", {50, false, word_of_the_answer}},
      {"longdialogue_qa_eng", {40, false, word_in_capitals}},
      {"longbook_choice_eng", {40, true, book_choice}},
      {"longbook_qa_eng",
       {40, false, [](auto text, auto& expected) { return best(text, expected, longbench::qa_f1); }}},
      {"longbook_qa_chn",
       {40, false, [](auto text, auto& expected) { return best(text, expected, longbench::qa_f1_zh); }}},
      {"math_find", {3, false, number_found}},
      {"math_calc", {30000, false, values_in_order}},
      {"code_run", {5, false, last_word}},
      {"code_debug", {5, true, code_choice}},
  };
  return table;
}

const Task& find_task(const std::string& name) {
  const auto found = tasks().find(name);
  SB_USER_CHECK(found != tasks().end(), "no metric for the task \"{}\"; the known tasks are {}", name,
                fmt::join(known_tasks(), ", "));
  return found->second;
}

}  // namespace

std::vector<std::string> known_tasks() {
  std::vector<std::string> names;
  for (const auto& [name, task] : tasks()) names.push_back(name);
  return names;
}

bool has_options(const std::string& task) {
  return find_task(task).options;
}

int64_t answer_tokens(const std::string& task) {
  return find_task(task).answer_tokens;
}

std::string answer_of(std::string_view generated) {
  return std::string(generated.substr(std::min(generated.find_first_not_of(" \t\r\n"), generated.size())));
}

double score(const std::string& task, std::string_view prediction, const Expected& expected) {
  SB_CHECK(!expected.answers.empty(), "a question without an answer");
  return find_task(task).score(prediction, expected);
}

}  // namespace sb::infinitebench
