#include "eval/longbench_metrics.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
#include <set>
#include <unordered_map>

#include "core/errors.h"

namespace sb::longbench {
namespace {

using Words = std::vector<std::string>;

bool is_punctuation(char c) {
  return std::ispunct(static_cast<unsigned char>(c)) != 0 && static_cast<unsigned char>(c) < 128;
}
char lower(char c) {
  return static_cast<unsigned char>(c) < 128 ? static_cast<char>(std::tolower(c)) : c;
}
bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0 && static_cast<unsigned char>(c) < 128;
}
bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

Words split_words(std::string_view text) {
  Words words;
  std::string word;
  for (const char c : text) {
    if (!is_space(c)) {
      word += c;
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

Words normalized_words(std::string_view text) {
  std::string kept;
  for (const char c : text) {
    if (!is_punctuation(c)) kept += lower(c);
  }
  Words words = split_words(kept);
  std::erase_if(words, [](const std::string& w) { return w == "a" || w == "an" || w == "the"; });
  return words;
}

// One UTF-8 character from `at`; a stray byte counts as a character of its own.
std::string_view character_at(std::string_view text, size_t at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  const size_t size = byte < 0x80 ? 1 : byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
  return text.substr(at, size);
}

// Full-width and CJK punctuation, as in the published scoring.
bool is_cjk_punctuation(std::string_view c) {
  static const std::set<std::string_view> marks = {
      "！", "？", "｡",  "。", "＂", "＃", "＄", "％", "＆", "＇", "（", "）", "＊", "＋", "，", "－", "／", "：", "；",
      "＜", "＝", "＞", "＠", "［", "＼", "］", "＾", "＿", "｀", "｛", "｜", "｝", "～", "｟", "｠", "｢",  "｣",  "､",
      "、", "〃", "》", "「", "」", "『", "』", "【", "】", "〔", "〕", "〖", "〗", "〘", "〙", "〚", "〛", "〜", "〝",
      "〞", "〟", "〰", "〾", "〿",  "–",  "—",  "‘",  "’",  "‛",  "“",  "”",  "„",  "‟",  "…",  "‧",  "﹏", ".",  "《"};
  return marks.count(c) != 0;
}

// Characters one by one, runs of ASCII letters and digits as one word; optionally without punctuation.
Words characters(std::string_view text, bool drop_punctuation) {
  Words words;
  bool in_word = false;
  for (size_t at = 0; at < text.size();) {
    const std::string_view c = character_at(text, at);
    at += c.size();
    const bool letter = c.size() == 1 && std::isalnum(static_cast<unsigned char>(c[0]));
    if (c.size() == 1 && is_space(c[0])) {
      in_word = false;
      continue;
    }
    if (drop_punctuation && ((c.size() == 1 && is_punctuation(c[0])) || is_cjk_punctuation(c))) {
      in_word = false;
      continue;
    }
    if (letter && in_word) {
      words.back() += lower(c[0]);
    } else {
      words.emplace_back(c.size() == 1 ? std::string(1, lower(c[0])) : std::string(c));
    }
    in_word = letter;
  }
  return words;
}

double f1(const Words& prediction, const Words& answer) {
  std::map<std::string_view, int> left;
  for (const std::string& word : answer) ++left[word];
  int same = 0;
  for (const std::string& word : prediction) {
    if (const auto it = left.find(word); it != left.end() && it->second > 0) {
      --it->second;
      ++same;
    }
  }
  if (same == 0) return 0;
  const double precision = static_cast<double>(same) / static_cast<double>(prediction.size());
  const double recall = static_cast<double>(same) / static_cast<double>(answer.size());
  return 2 * precision * recall / (precision + recall);
}

std::vector<Words> sentences(std::string_view text) {
  std::vector<Words> found;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find('.', begin), text.size());
    if (end > begin) found.push_back(split_words(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return found;
}

// The words of one longest common subsequence, walked back from the end (the left word is dropped on a tie).
std::set<std::string> common_words(const Words& x, const Words& y) {
  const size_t n = x.size(), m = y.size();
  std::vector<int> table((n + 1) * (m + 1), 0);
  const auto at = [&](size_t i, size_t j) -> int& { return table[i * (m + 1) + j]; };
  for (size_t i = 1; i <= n; ++i) {
    for (size_t j = 1; j <= m; ++j) {
      at(i, j) = x[i - 1] == y[j - 1] ? at(i - 1, j - 1) + 1 : std::max(at(i - 1, j), at(i, j - 1));
    }
  }
  std::set<std::string> words;
  for (size_t i = n, j = m; i > 0 && j > 0;) {
    if (x[i - 1] == y[j - 1]) {
      words.insert(x[i - 1]);
      --i;
      --j;
    } else if (at(i - 1, j) > at(i, j - 1)) {
      --i;
    } else {
      --j;
    }
  }
  return words;
}

double rouge_l(const std::vector<Words>& prediction, const std::vector<Words>& answer) {
  std::set<std::string> predicted, expected, common;
  for (const Words& sentence : prediction) predicted.insert(sentence.begin(), sentence.end());
  for (const Words& sentence : answer) {
    expected.insert(sentence.begin(), sentence.end());
    for (const Words& said : prediction) common.merge(common_words(sentence, said));
  }
  if (predicted.empty() || expected.empty()) return 0;
  const double recall = static_cast<double>(common.size()) / static_cast<double>(expected.size());
  const double precision = static_cast<double>(common.size()) / static_cast<double>(predicted.size());
  return 2 * precision * recall / (precision + recall + 1e-8);
}

Words numbers(std::string_view text) {
  Words found;
  for (size_t i = 0; i < text.size(); ++i) {
    if (!is_digit(text[i])) continue;
    size_t end = i;
    while (end < text.size() && is_digit(text[end])) ++end;
    found.emplace_back(text.substr(i, end - i));
    i = end;
  }
  return found;
}

double share_equal(const Words& found, std::string_view wanted) {
  if (found.empty()) return 0;
  const auto right = std::count(found.begin(), found.end(), wanted);
  return static_cast<double>(right) / static_cast<double>(found.size());
}

// The number right after `prefix` in the answer.
std::string paragraph_number(std::string_view answer, std::string_view prefix) {
  for (size_t at = answer.find(prefix); at != std::string_view::npos; at = answer.find(prefix, at + 1)) {
    const Words found = numbers(answer.substr(at + prefix.size()));
    if (at + prefix.size() < answer.size() && is_digit(answer[at + prefix.size()])) return found.front();
  }
  throw UserError("retrieval answer without '{}' and a number: {}", prefix, answer);
}

// Characters in matching blocks: the longest common substring, then the same left and right of it.
size_t matching_characters(std::string_view a, std::string_view b) {
  size_t matched = 0;
  std::vector<std::array<size_t, 4>> pending = {{0, a.size(), 0, b.size()}};
  std::unordered_map<char, std::vector<size_t>> places;
  for (size_t j = 0; j < b.size(); ++j) places[b[j]].push_back(j);
  while (!pending.empty()) {
    const auto [a_low, a_high, b_low, b_high] = pending.back();
    pending.pop_back();
    size_t best_a = a_low, best_b = b_low, best = 0;
    std::unordered_map<size_t, size_t> runs;
    for (size_t i = a_low; i < a_high; ++i) {
      std::unordered_map<size_t, size_t> next;
      for (const size_t j : places[a[i]]) {
        if (j < b_low || j >= b_high) continue;
        const auto before = j > 0 ? runs.find(j - 1) : runs.end();
        const size_t length = (before == runs.end() ? 0 : before->second) + 1;
        next[j] = length;
        if (length > best) {
          best = length;
          best_a = i + 1 - length;
          best_b = j + 1 - length;
        }
      }
      runs = std::move(next);
    }
    if (best == 0) continue;
    matched += best;
    pending.push_back({a_low, best_a, b_low, best_b});
    pending.push_back({best_a + best, a_high, best_b + best, b_high});
  }
  return matched;
}

std::string_view first_line(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  return text.substr(0, text.find('\n'));
}

std::string_view first_code_line(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  while (true) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    const bool code = line.find('`') == std::string_view::npos && line.find('#') == std::string_view::npos &&
                      line.find("//") == std::string_view::npos;
    if (code) return line;
    if (end == text.size()) return {};
    text.remove_prefix(end + 1);
  }
}

enum class Metric { qa, qa_zh, rouge, rouge_zh, classes, retrieval, retrieval_zh, count, code };

const std::map<std::string, Metric>& tasks() {
  static const std::map<std::string, Metric> table = {{"narrativeqa", Metric::qa},
                                                      {"qasper", Metric::qa},
                                                      {"multifieldqa_en", Metric::qa},
                                                      {"multifieldqa_zh", Metric::qa_zh},
                                                      {"hotpotqa", Metric::qa},
                                                      {"2wikimqa", Metric::qa},
                                                      {"musique", Metric::qa},
                                                      {"dureader", Metric::rouge_zh},
                                                      {"gov_report", Metric::rouge},
                                                      {"qmsum", Metric::rouge},
                                                      {"multi_news", Metric::rouge},
                                                      {"vcsum", Metric::rouge_zh},
                                                      {"trec", Metric::classes},
                                                      {"triviaqa", Metric::qa},
                                                      {"samsum", Metric::rouge},
                                                      {"lsht", Metric::classes},
                                                      {"passage_retrieval_en", Metric::retrieval},
                                                      {"passage_count", Metric::count},
                                                      {"passage_retrieval_zh", Metric::retrieval_zh},
                                                      {"lcc", Metric::code},
                                                      {"repobench-p", Metric::code}};
  return table;
}

}  // namespace

double qa_f1(std::string_view prediction, std::string_view answer) {
  return f1(normalized_words(prediction), normalized_words(answer));
}

double qa_f1_zh(std::string_view prediction, std::string_view answer) {
  return f1(characters(prediction, true), characters(answer, true));
}

double rouge_l(std::string_view prediction, std::string_view answer) {
  return rouge_l(sentences(prediction), sentences(answer));
}

double rouge_l_zh(std::string_view prediction, std::string_view answer) {
  const Words said = characters(prediction, false), expected = characters(answer, false);
  if (said.empty() || expected.empty()) return 0;
  return rouge_l(std::vector<Words>{said}, std::vector<Words>{expected});
}

double classification(std::string_view prediction, std::string_view answer, const std::vector<std::string>& classes) {
  std::vector<std::string> matches;
  for (const std::string& name : classes) {
    if (prediction.find(name) != std::string_view::npos) matches.push_back(name);
  }
  std::erase_if(matches,
                [&](const std::string& name) { return answer.find(name) != std::string_view::npos && name != answer; });
  const bool right = std::find(matches.begin(), matches.end(), answer) != matches.end();
  return right ? 1.0 / static_cast<double>(matches.size()) : 0.0;
}

double retrieval(std::string_view prediction, std::string_view answer) {
  return share_equal(numbers(prediction), paragraph_number(answer, "Paragraph "));
}

double retrieval_zh(std::string_view prediction, std::string_view answer) {
  return share_equal(numbers(prediction), paragraph_number(answer, "段落"));
}

double count(std::string_view prediction, std::string_view answer) {
  return share_equal(numbers(prediction), answer);
}

double code_similarity(std::string_view prediction, std::string_view answer) {
  const std::string_view line = first_code_line(prediction);
  if (line.empty() || answer.empty()) return 0;
  const double matched = static_cast<double>(matching_characters(line, answer));
  return std::nearbyint(200.0 * matched / static_cast<double>(line.size() + answer.size())) / 100.0;
}

double score(const std::string& task, std::string_view prediction, const std::vector<std::string>& answers,
             const std::vector<std::string>& classes) {
  const auto found = tasks().find(task);
  SB_USER_CHECK(found != tasks().end(),
                "unknown LongBench task '{}'; sparsebalance eval longbench --help lists the known ones", task);
  if (task == "trec" || task == "triviaqa" || task == "samsum" || task == "lsht") prediction = first_line(prediction);
  double best = 0;
  for (const std::string& answer : answers) {
    double value = 0;
    switch (found->second) {
      case Metric::qa:
        value = qa_f1(prediction, answer);
        break;
      case Metric::qa_zh:
        value = qa_f1_zh(prediction, answer);
        break;
      case Metric::rouge:
        value = rouge_l(prediction, answer);
        break;
      case Metric::rouge_zh:
        value = rouge_l_zh(prediction, answer);
        break;
      case Metric::classes:
        value = classification(prediction, answer, classes);
        break;
      case Metric::retrieval:
        value = retrieval(prediction, answer);
        break;
      case Metric::retrieval_zh:
        value = retrieval_zh(prediction, answer);
        break;
      case Metric::count:
        value = count(prediction, answer);
        break;
      case Metric::code:
        value = code_similarity(prediction, answer);
        break;
    }
    best = std::max(best, value);
  }
  return best;
}

std::vector<std::string> known_tasks() {
  std::vector<std::string> names;
  for (const auto& [name, metric] : tasks()) names.push_back(name);
  return names;
}

}  // namespace sb::longbench
