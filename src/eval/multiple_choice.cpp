#include "eval/multiple_choice.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {
namespace {

constexpr std::string_view kPlaces[] = {"$DOC$", "$Q$", "$C_A$", "$C_B$", "$C_C$", "$C_D$"};

// The first letter that follows `before` and is followed by `after`.
char letter_between(std::string_view text, std::string_view before, std::string_view after) {
  for (size_t at = text.find(before); at != std::string_view::npos; at = text.find(before, at + 1)) {
    const std::string_view rest = text.substr(at + before.size());
    if (!rest.empty() && kChoiceLetters.find(rest.front()) != std::string_view::npos &&
        rest.substr(1).starts_with(after))
      return rest.front();
  }
  return 0;
}

}  // namespace

const std::string_view kPlainChoiceTemplate =
    "Read this text, then answer a question about it.\n\n$DOC$\n\nQuestion: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) "
    "$C_D$\n\nGive the answer in the form \"The correct answer is (letter)\".\n";

char named_choice(std::string_view answer) {
  std::string text(answer);
  std::erase(text, '*');
  const char bracketed = letter_between(text, "The correct answer is (", ")");
  return bracketed != 0 ? bracketed : letter_between(text, "The correct answer is ", "");
}

void check_choice_template(const std::string& file, std::string_view text) {
  for (const std::string_view place : kPlaces)
    SB_USER_CHECK(text.find(place) != std::string_view::npos,
                  "{}: a prompt template must contain {}; LongBench v2's prompts/0shot.txt is an example", file, place);
}

std::string fill_choice_template(std::string_view text, const ChoiceQuestion& question) {
  SB_CHECK(question.choices.size() == kChoiceLetters.size(), "{} choices", question.choices.size());
  const std::string_view values[] = {question.context,    question.question,   question.choices[0],
                                     question.choices[1], question.choices[2], question.choices[3]};
  std::string filled;
  while (!text.empty()) {
    const auto* place = std::find_if(std::begin(kPlaces), std::end(kPlaces),
                                     [&](std::string_view name) { return text.starts_with(name); });
    if (place != std::end(kPlaces)) {
      filled += values[place - std::begin(kPlaces)];
      text.remove_prefix(place->size());
    } else {
      filled += text.front();
      text.remove_prefix(1);
    }
  }
  return filled;
}

}  // namespace sb
