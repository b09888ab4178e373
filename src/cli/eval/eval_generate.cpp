#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_options.h"
#include "core/errors.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

void run_generate(const EvalOptions& options, const std::vector<std::string>& prompts, bool token_ids) {
  EvalModel model = open_model(options);
  Json rows = Json::array();
  if (token_ids) {
    std::vector<std::vector<int32_t>> tokens;
    for (const std::string& prompt : prompts) {
      std::istringstream words(prompt);
      std::vector<int32_t>& ids = tokens.emplace_back();
      for (std::string word; words >> word;) {
        const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), ids.emplace_back());
        SB_USER_CHECK(end == word.data() + word.size() && problem != std::errc::invalid_argument,
                      "--prompt \"{}\": with --token-ids a prompt is a list of numbers separated by spaces", prompt);
        SB_USER_CHECK(problem == std::errc(), "--prompt \"{}\": {} is not a token id: it does not fit in 32 bits",
                      prompt, word);
      }
    }
    GenerationOptions how = generation(options);
    how.stop_tokens = model.stop_tokens();
    for (const std::vector<int32_t>& ids : model.generate(tokens, how)) {
      std::string line;
      for (const int32_t id : ids) line += fmt::format("{}{}", line.empty() ? "" : " ", id);
      std::printf("%s\n", line.c_str());
      rows.push_back({{"tokens", ids}});
    }
  } else {
    for (const std::string& text : model.answer(prompts, generation(options), {}, {.chat = options.chat})) {
      std::printf("%s\n", text.c_str());
      rows.push_back({{"text", text}});
    }
  }
  write_json(options, Json({{"task", "generate"}, {"rows", rows}}).dump());
}

}  // namespace

void add_eval_generate(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* generate = eval.add_subcommand("generate", "generate continuations of prompts");
  auto prompts = std::make_shared<std::vector<std::string>>();
  auto token_ids = std::make_shared<bool>(false);
  add_common(generate, *options, true);
  add_sampling(generate, *options);
  generate->add_option("--prompt", *prompts, "prompt text; may be repeated")->required();
  generate->add_flag("--token-ids", *token_ids, "prompts and answers are token ids (for models without a tokenizer)")
      ->excludes("--chat");
  generate->callback([=] { run_generate(*options, *prompts, *token_ids); });
}

}  // namespace sb
