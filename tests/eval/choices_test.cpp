#include <gtest/gtest.h>

#include "core/errors.h"
#include "eval/infinitebench_metrics.h"
#include "eval/multiple_choice.h"

namespace sb {
namespace {

TEST(MultipleChoice, TheLetterIsReadFromTheSentence) {
  EXPECT_EQ(named_choice("The correct answer is (B)"), 'B');
  EXPECT_EQ(named_choice("I think so. The correct answer is **(D)**, as said."), 'D');
  EXPECT_EQ(named_choice("The correct answer is C."), 'C');
  EXPECT_EQ(named_choice("The correct answer is A or the correct answer is B. The correct answer is (B)"), 'B');
  EXPECT_EQ(named_choice("The correct answer is (E)"), 0);
  EXPECT_EQ(named_choice("(A)"), 0);
  EXPECT_EQ(named_choice("The correct answer is ("), 0);
  EXPECT_EQ(named_choice(""), 0);
}

TEST(MultipleChoice, PartsOfAQuestionAreTextAlone) {
  const ChoiceQuestion question{"costs $Q$ and $5", "which?", {"a", "$C_D$", "c", "d"}};
  const std::string form = "$DOC$|$Q$|$C_A$|$C_B$|$C_C$|$C_D$|$$";
  check_choice_template("here", form);
  EXPECT_EQ(fill_choice_template(form, question), "costs $Q$ and $5|which?|a|$C_D$|c|d|$$");
  check_choice_template("ours", kPlainChoiceTemplate);
  try {
    check_choice_template("prompt.txt", "$DOC$ $Q$ $C_A$ $C_B$ $C_D$");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("prompt.txt: a prompt template must contain $C_C$"), std::string::npos)
        << error.what();
  }
}

double score(const char* task, const char* prediction, std::vector<std::string> answers,
             std::vector<std::string> options = {}) {
  return infinitebench::score(task, prediction, {std::move(answers), std::move(options)});
}

TEST(InfiniteBench, RetrievedNumbersAndWords) {
  EXPECT_EQ(score("passkey", "The key is 71432. Not 5.", {"71432"}), 1);
  EXPECT_EQ(score("passkey", "5, then 71432", {"71432"}), 0);  // the first number counts
  EXPECT_EQ(score("number_string", "none", {"11"}), 0);
  EXPECT_EQ(score("kv_retrieval", "\"a-b\": \"c-d\"", {"c-d"}), 1);
  EXPECT_EQ(score("kv_retrieval", "c-de", {"c-d"}), 0);
  EXPECT_EQ(score("longdialogue_qa_eng", "It is Marty.", {"MARTY"}), 1);
  EXPECT_EQ(score("longdialogue_qa_eng", "Marty-Lou", {"MARTY"}), 0);
}

TEST(InfiniteBench, NumbersOfMathAndCode) {
  EXPECT_EQ(score("math_find", "It is 4.5, I think", {"4.5"}), 1);
  EXPECT_EQ(score("math_find", "12.", {"12"}), 1);
  EXPECT_EQ(score("math_find", "no", {"12"}), 0);
  EXPECT_DOUBLE_EQ(score("math_calc", "[1, 4, 9]", {"1", "4", "8", "7"}), 0.5);  // two of four in order
  EXPECT_EQ(score("math_calc", "", {"1"}), 0);
  EXPECT_EQ(score("code_run", "The value is: -17.", {"-17"}), 1);
  EXPECT_EQ(score("code_run", "17 or so", {"17"}), 0);
  EXPECT_EQ(score("code_run", "", {"17"}), 0);
}

TEST(InfiniteBench, Choices) {
  const std::vector<std::string> options = {"Ann", "Bob", "Cy", "Dee"};
  const auto book = [&](const char* text) { return score("longbook_choice_eng", text, {"Bob"}, options); };
  EXPECT_EQ(book("B"), 1);
  EXPECT_EQ(book("C. Cy"), 0);
  EXPECT_EQ(book("the answer is: B"), 1);
  EXPECT_EQ(book("the answer is: Bob"), 1);
  EXPECT_EQ(book("the answer is: C"), 0);
  EXPECT_EQ(book("surely B , I say"), 1);
  EXPECT_EQ(book(""), 0);
  const auto code = [&](const char* text) {
    return score("code_debug", text, {"Bob", "B"});
  };  // as older files have it
  EXPECT_EQ(code("B."), 1);
  EXPECT_EQ(code("B"), 1);
  EXPECT_EQ(code("B) Bob"), 1);
  EXPECT_EQ(code("A"), 0);
  EXPECT_EQ(code("A."), 0);
  EXPECT_EQ(code("By chance"), 0);
  EXPECT_EQ(code(""), 0);
  EXPECT_EQ(code("The answer is: `Bob`"), 1);
  EXPECT_EQ(code("The answer is:"), 0);
  EXPECT_EQ(code(" B."), 0);  // the published metric
  EXPECT_EQ(code(infinitebench::answer_of(" B.").c_str()), 1);
  EXPECT_THROW(score("code_debug", "B.", {"Eve"}, options), UserError);
}

TEST(InfiniteBench, AnswersOfAModelBeginWithTheirFirstWord) {
  EXPECT_EQ(infinitebench::answer_of("\n\t B. b \n"), "B. b \n");
  EXPECT_EQ(infinitebench::answer_of("B"), "B");
  EXPECT_EQ(infinitebench::answer_of(" \n"), "");
  EXPECT_EQ(infinitebench::answer_of(""), "");
}

TEST(InfiniteBench, AnswersInWords) {
  EXPECT_DOUBLE_EQ(score("longbook_qa_eng", "the red house", {"a house", "blue"}),
                   2.0 / 3.0);                                          // precision 1/2, recall 1
  EXPECT_DOUBLE_EQ(score("longbook_qa_chn", "红房", {"红房子"}), 0.8);  // precision 1, recall 2/3
  EXPECT_THROW(score("longbook_sum_eng", "a", {"a"}), UserError);
}

}  // namespace
}  // namespace sb
