#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

// How LongBench's own script asks: files of its `config` folder, by task.
namespace sb::longbench {

// dataset2prompt.json: a template with {context} and {input} for each task. UserError names the file and the task.
std::map<std::string, std::string> read_templates(const std::filesystem::path& file);
// dataset2maxlen.json: most tokens of an answer for each task.
std::map<std::string, int64_t> read_answer_lengths(const std::filesystem::path& file);

// The template with both put in. What they contain is text: braces in it mean nothing.
std::string fill(std::string_view prompt, std::string_view context, std::string_view input);

// The tasks whose prompts the published script puts into a chat where the model has one; not those that go on with
// examples or code.
bool takes_a_chat(const std::string& task);

}  // namespace sb::longbench
