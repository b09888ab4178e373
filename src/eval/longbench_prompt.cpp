#include "eval/longbench_prompt.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb::longbench {
namespace {

using nlohmann::json;

json read_object(const std::filesystem::path& file) {
  const json object = json::parse(read_regular_file(file), nullptr, /*allow_exceptions=*/false);
  SB_USER_CHECK(object.is_object(), "{}: not a JSON object with a key for each task", file.string());
  return object;
}

}  // namespace

std::map<std::string, std::string> read_templates(const std::filesystem::path& file) {
  std::map<std::string, std::string> templates;
  const json object = read_object(file);
  for (const auto& [task, prompt] : object.items()) {
    SB_USER_CHECK(prompt.is_string() && prompt.get<std::string>().find("{context}") != std::string::npos,
                  "{}: {}: must be a string that contains {{context}}", file.string(), task);
    templates[task] = prompt;
  }
  return templates;
}

std::map<std::string, int64_t> read_answer_lengths(const std::filesystem::path& file) {
  std::map<std::string, int64_t> lengths;
  const json object = read_object(file);
  for (const auto& [task, length] : object.items()) {
    SB_USER_CHECK(length.is_number_integer() && length > 0 && length < (1 << 20), "{}: {}: must be a number of tokens",
                  file.string(), task);
    lengths[task] = length;
  }
  return lengths;
}

bool takes_a_chat(const std::string& task) {
  constexpr std::string_view kContinued[] = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"};
  return std::find(std::begin(kContinued), std::end(kContinued), task) == std::end(kContinued);
}

std::string fill(std::string_view prompt, std::string_view context, std::string_view input) {
  std::string text;
  while (true) {
    const size_t brace = prompt.find('{');
    text += prompt.substr(0, brace);
    if (brace == std::string_view::npos) return text;
    prompt.remove_prefix(brace);
    const auto put = [&](std::string_view name, std::string_view value) {
      if (!prompt.starts_with(name)) return false;
      text += value;
      prompt.remove_prefix(name.size());
      return true;
    };
    if (!put("{context}", context) && !put("{input}", input)) put("{", "{");
  }
}

}  // namespace sb::longbench
