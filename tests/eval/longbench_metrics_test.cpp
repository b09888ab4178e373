#include "eval/longbench_metrics.h"

#include <gtest/gtest.h>

#include "core/errors.h"

namespace sb::longbench {
namespace {

// Every expected value is worked out beside it.

TEST(LongBench, QaF1) {
  EXPECT_DOUBLE_EQ(qa_f1("The Eiffel Tower!", "eiffel tower"), 1.0);  // articles, case and punctuation do not count
  // prediction: in paris france (3), answer: paris (1); one in common: P 1/3, R 1, F 2·(1/3)/(4/3) = 0.5
  EXPECT_DOUBLE_EQ(qa_f1("in Paris, France", "Paris"), 0.5);
  // x x y against x y y: min counts x 1, y 1: P 2/3, R 2/3
  EXPECT_DOUBLE_EQ(qa_f1("x x y", "x y y"), 2.0 / 3);
  EXPECT_DOUBLE_EQ(qa_f1("", "Paris"), 0.0);
  EXPECT_DOUBLE_EQ(qa_f1("London", "Paris"), 0.0);
  EXPECT_DOUBLE_EQ(qa_f1("theme park", "the park"), 2.0 / 3);  // "theme" is no article: P 1/2, R 1
}

TEST(LongBench, QaF1Chinese) {
  EXPECT_DOUBLE_EQ(qa_f1_zh("北京。", "北京"), 1.0);
  // 北 京 市 against 北 京: P 2/3, R 1, F 0.8
  EXPECT_DOUBLE_EQ(qa_f1_zh("北京市", "北京"), 0.8);
  EXPECT_DOUBLE_EQ(qa_f1_zh("GPT 模型", "gpt模型"), 1.0);
  EXPECT_DOUBLE_EQ(qa_f1_zh("上海", "北京"), 0.0);
}

TEST(LongBench, RougeL) {
  EXPECT_NEAR(rouge_l("the cat sat", "the cat sat"), 1.0, 1e-7);
  // answer: the cat sat on the mat (5 distinct words); prediction: the cat on mat (4). Common subsequence: the cat on
  // mat. R 4/5, P 1, F 8/9
  EXPECT_NEAR(rouge_l("the cat on mat", "the cat sat on the mat"), 8.0 / 9, 1e-7);
  // Order matters: "b a" against "a b" shares one word: R 1/2, P 1/2
  EXPECT_NEAR(rouge_l("b a", "a b"), 0.5, 1e-7);
  // Two sentences: the union over both: {a b} and {c}: 3 of 4 distinct expected words {a b c d}; predicted {a b c}.
  EXPECT_NEAR(rouge_l("a b. c", "a b. d c"), 2 * 0.75 / 1.75, 1e-7);
  EXPECT_DOUBLE_EQ(rouge_l("", "a"), 0.0);
  EXPECT_DOUBLE_EQ(rouge_l("...", "a"), 0.0);
}

TEST(LongBench, RougeLChinese) {
  // 今 天 好 against 今 天 很 好: common 3; R 3/4, P 1
  EXPECT_NEAR(rouge_l_zh("今天好", "今天很好"), 2 * 0.75 / 1.75, 1e-7);
  EXPECT_DOUBLE_EQ(rouge_l_zh("", "好"), 0.0);
}

TEST(LongBench, Classification) {
  const std::vector<std::string> classes = {"City", "Country", "City state"};
  EXPECT_DOUBLE_EQ(classification("Type: City", "City", classes), 1.0);
  EXPECT_DOUBLE_EQ(classification("City or Country", "City", classes), 0.5);
  EXPECT_DOUBLE_EQ(classification("City state", "City state", classes), 1.0);  // "City" lies inside the right name
  EXPECT_DOUBLE_EQ(classification("Country", "City", classes), 0.0);
}

TEST(LongBench, Retrieval) {
  EXPECT_DOUBLE_EQ(retrieval("Paragraph 17", "Paragraph 17"), 1.0);
  EXPECT_DOUBLE_EQ(retrieval("It is 17 or 3", "Paragraph 17"), 0.5);
  EXPECT_DOUBLE_EQ(retrieval("none", "Paragraph 17"), 0.0);
  EXPECT_DOUBLE_EQ(retrieval("1", "Paragraph 17"), 0.0);
  EXPECT_THROW(retrieval("1", "17"), UserError);
  EXPECT_DOUBLE_EQ(retrieval_zh("段落5和段落6", "段落6"), 0.5);
}

TEST(LongBench, Count) {
  EXPECT_DOUBLE_EQ(count("There are 12 paragraphs", "12"), 1.0);
  EXPECT_DOUBLE_EQ(count("12, no, 13, 12", "12"), 2.0 / 3);
  EXPECT_DOUBLE_EQ(count("many", "12"), 0.0);
}

TEST(LongBench, CodeSimilarity) {
  EXPECT_DOUBLE_EQ(code_similarity("return x", "return x"), 1.0);
  // The first two lines are a fence and a comment. "abcd" against "bcde": "bcd" matches: 2·3/8 = 0.75
  EXPECT_DOUBLE_EQ(code_similarity("\n```\n# note\nabcd\nrest", "bcde"), 0.75);
  // "ab" + "cd" around a changed middle: 2·4/(5+6) = 0.727… → 0.73
  EXPECT_DOUBLE_EQ(code_similarity("abXcd", "abYZcd"), 0.73);
  EXPECT_DOUBLE_EQ(code_similarity("// only\n# comments", "x"), 0.0);
  EXPECT_DOUBLE_EQ(code_similarity("", "x"), 0.0);
}

TEST(LongBench, ScoreTakesTheBestAnswerAndCutsWhereTheTaskSays) {
  EXPECT_DOUBLE_EQ(score("narrativeqa", "Paris", {"London", "Paris"}, {}), 1.0);
  EXPECT_DOUBLE_EQ(score("triviaqa", "\nParis\nQuestion: and then", {"Paris"}, {}), 1.0);
  EXPECT_LT(score("hotpotqa", "Paris\nQuestion: and then", {"Paris"}, {}), 1.0);
  EXPECT_DOUBLE_EQ(score("trec", "City\nCountry", {"City"}, {"City", "Country"}), 1.0);
  EXPECT_DOUBLE_EQ(score("passage_count", "3", {"3"}, {}), 1.0);
  EXPECT_DOUBLE_EQ(score("lcc", "x = 1", {"x = 1"}, {}), 1.0);
  EXPECT_THROW(score("unknown", "", {""}, {}), UserError);
  EXPECT_EQ(known_tasks().size(), 21u);
}

}  // namespace
}  // namespace sb::longbench
