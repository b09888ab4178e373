#pragma once

#include <string>
#include <string_view>
#include <vector>

// Questions with four lettered answers.
namespace sb {

inline constexpr std::string_view kChoiceLetters = "ABCD";

// The letter that an answer in the form "The correct answer is (B)" names, brackets or not and whatever is emphasised
// with asterisks, as LongBench v2 reads it; 0: none.
char named_choice(std::string_view answer);

struct ChoiceQuestion {
  std::string context, question;
  std::vector<std::string> choices;  // as many as there are letters
};
// The form that LongBench v2 publishes its prompts in: $DOC$, $Q$, $C_A$ to $C_D$ stand for the question's parts, whose
// own dollars mean nothing. UserError names the file where one of them is missing.
void check_choice_template(const std::string& file, std::string_view text);
std::string fill_choice_template(std::string_view text, const ChoiceQuestion& question);
// A plain one, for who has no file.
extern const std::string_view kPlainChoiceTemplate;

}  // namespace sb
