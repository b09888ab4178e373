#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// InfiniteBench's tasks as its published scoring defines them; every score is in 0 … 1.
namespace sb::infinitebench {

// What a line says is right: `answers` as they stand there, and the options it gives, where it gives some.
struct Expected {
  std::vector<std::string> answers, options;
};

std::vector<std::string> known_tasks();
// Whether a line of the task has four options.
bool has_options(const std::string& task);
// Tokens that the published script lets an answer have.
int64_t answer_tokens(const std::string& task);
// What a model wrote after a prompt, without the white space that parts the two: the metrics look at how an answer
// begins.
std::string answer_of(std::string_view generated);
// UserError for an unknown task, or where the right answer is none of the options.
double score(const std::string& task, std::string_view prediction, const Expected& expected);

}  // namespace sb::infinitebench
