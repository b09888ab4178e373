#include "data/synthetic/ruler_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "core/errors.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

RulerOptions options_for(std::string_view task, int64_t length) {
  RulerOptions options;
  options.task = parse_ruler_task(task);
  options.length = length;
  return options;
}

TEST(RulerText, FillsTheLengthInRulersLayout) {
  for (std::string_view task : ruler_task_names())
    for (int64_t length : {2000, 8192, 30000}) {
      SCOPED_TRACE(std::string(task) + " " + std::to_string(length));
      const RulerSample sample = make_ruler_sample(options_for(task, length), count_words, 1, 5);
      EXPECT_LE(sample.length, length);
      EXPECT_GE(sample.length, length * 95 / 100);
      EXPECT_EQ(make_ruler_sample(options_for(task, length), count_words, 1, 5).input, sample.input);
      EXPECT_NE(make_ruler_sample(options_for(task, length), count_words, 1, 6).outputs, sample.outputs);
      EXPECT_NE(make_ruler_sample(options_for(task, length), count_words, 2, 5).outputs, sample.outputs);
      const auto line = nlohmann::ordered_json::parse(ruler_jsonl(sample));
      std::vector<std::string> keys;
      for (const auto& [key, value] : line.items()) keys.push_back(key);
      EXPECT_EQ(keys, (std::vector<std::string>{"index", "input", "outputs", "length"}));
      EXPECT_EQ(line["outputs"].size(), sample.outputs.size());
    }
}

TEST(RulerText, AnswersFollowFromTheText) {
  for (int64_t index = 0; index < 5; ++index) {
    RulerSample sample = make_ruler_sample(options_for("niah_multivalue", 3000), count_words, 3, index);
    EXPECT_EQ(sample.outputs.size(), 4u);
    for (const std::string& value : sample.outputs)
      EXPECT_NE(sample.input.find(" is: " + value + "."), std::string::npos);

    sample = make_ruler_sample(options_for("vt", 3000), count_words, 3, index);
    const std::string asked = sample.input.substr(sample.input.find("assigned the value ") + 19, 5);
    std::map<std::string, std::string> held;
    std::vector<std::string> answer;
    const auto words = words_of(sample.input);
    for (size_t i = 0; i + 3 < words.size(); ++i)
      if (words[i] == "VAR" && words[i + 2] == "=") {
        held[words[i + 1]] = words[i + 3] == "VAR" ? held[words[i + 4]] : words[i + 3];
        if (held[words[i + 1]] == asked) answer.push_back(words[i + 1]);
      }
    EXPECT_EQ(answer, sample.outputs);

    for (const char* task : {"cwe", "fwe"}) {
      sample = make_ruler_sample(options_for(task, 3000), count_words, 3, index);
      std::map<std::string, int> counts;
      const std::string body = sample.input.substr(0, sample.input.find("\nQuestion"));
      for (const std::string& word : words_of(body.substr(body.find(task[0] == 'c' ? '\n' : '.'))))
        if (std::islower(static_cast<unsigned char>(word[0]))) ++counts[word];
      std::vector<std::pair<int, std::string>> ranked;
      for (const auto& [word, count] : counts) ranked.push_back({count, word});
      std::sort(ranked.rbegin(), ranked.rend());
      const size_t n = sample.outputs.size();
      EXPECT_GT(ranked[n - 1].first, ranked[n].first);
      std::set<std::string> best;
      for (size_t i = 0; i < n; ++i) best.insert(ranked[i].second);
      EXPECT_EQ(best, std::set<std::string>(sample.outputs.begin(), sample.outputs.end())) << task;
    }
  }
}

// What stands in the last 512 words holds no answer, and no fact that leads to one.
TEST(RulerText, TheLast512WordsTellNothing) {
  for (std::string_view task : ruler_task_names())
    for (int64_t index = 0; index < 10; ++index) {
      SCOPED_TRACE(std::string(task));
      const RulerSample sample = make_ruler_sample(options_for(task, 5000), count_words, 9, index);
      const std::vector<std::string> words = words_of(sample.input);
      std::string tail;
      for (size_t i = words.size() - 512; i < words.size(); ++i) tail += words[i] + " ";
      for (const std::string& answer : sample.outputs) EXPECT_EQ(tail.find(answer), std::string::npos) << answer;
      EXPECT_EQ(tail.find("One of the special magic numbers for"), std::string::npos);
      EXPECT_EQ(tail.find("VAR "), std::string::npos);
      // The whole text does hold them: the check can fail.
      for (const std::string& answer : sample.outputs) EXPECT_NE(sample.input.find(answer), std::string::npos);
    }
}

TEST(RulerText, Depth) {
  RulerOptions options = options_for("niah_single", 3000);
  size_t before = 0;
  for (double depth : {0.0, 0.5, 1.0}) {
    options.depth = depth;
    const size_t at = make_ruler_sample(options, count_words, 3, 0).input.find("One of the special");
    EXPECT_TRUE(depth == 0.0 || at > before);
    before = at;
  }
}

TEST(RulerText, RefusesWhatCannotBe) {
  EXPECT_NE(user_error([] { parse_ruler_task("qa_1"); }).find("niah_single"), std::string::npos);
  EXPECT_THROW(make_ruler_sample(options_for("niah_single", 150), count_words, 1, 0), UserError);
  EXPECT_THROW(make_ruler_sample(options_for("cwe", 300), count_words, 1, 0), UserError);
  RulerOptions options = options_for("niah_multiquery", 4000);
  options.queries = 5;
  EXPECT_THROW(make_ruler_sample(options, count_words, 1, 0), UserError);
}

}  // namespace
}  // namespace sb
