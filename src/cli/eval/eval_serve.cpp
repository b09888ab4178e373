#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_options.h"
#include "core/errors.h"
#include "core/labels.h"

// A model that another program asks, a line of JSON each way: how `sparsebalance.lm_eval` runs ours under the LM
// evaluation harness. docs/evaluation.md has the requests.
namespace sb {
namespace {

using Json = nlohmann::ordered_json;

void say(const Json& answer) {
  std::printf("%s\n", answer.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  std::fflush(stdout);
}

// Whatever is missing or of another type is the request's fault.
template <typename T>
T field(const Json& object, const char* key) {
  try {
    return object.at(key).get<T>();
  } catch (const nlohmann::json::exception&) {
    throw UserError("key \"{}\" is missing or of another type", key);
  }
}
template <typename T>
T field_or(const Json& object, const char* key, T otherwise) {
  return object.contains(key) ? field<T>(object, key) : otherwise;
}

void check_vocabulary(const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (const int32_t token : tokens)
    SB_USER_CHECK(0 <= token && token < vocab_size, "token {} is outside the vocabulary of {}", token, vocab_size);
}

// The last `targets` tokens, given those before them.
Json score(EvalModel& model, const Json& request) {
  std::vector<int32_t> tokens = field<std::vector<int32_t>>(request, "tokens");
  const auto targets = field<int64_t>(request, "targets");
  SB_USER_CHECK(targets >= 1 && targets < std::ssize(tokens), "{} targets of {} tokens; the first cannot be one",
                targets, tokens.size());
  check_vocabulary(tokens, model.config().vocab_size);
  std::vector<int32_t> labels(tokens.begin() + 1, tokens.end());
  tokens.pop_back();
  std::fill(labels.begin(), labels.end() - targets, kIgnoredLabel);
  const LossSums sums = model.score(tokens, labels).sums;
  return {{"loglikelihood", -sums.nll}, {"greedy", sums.correct == sums.targets}};
}

// Says every token as it comes and is told whether its prompt goes on.
Json generate(EvalModel& model, const Json& request) {
  const auto prompts = field<std::vector<std::vector<int32_t>>>(request, "prompts");
  GenerationOptions options;
  options.max_new_tokens = field<int64_t>(request, "max_new_tokens");
  SB_USER_CHECK(options.max_new_tokens >= 1, "max_new_tokens is {}", options.max_new_tokens);
  options.sampling = {field_or(request, "temperature", 0.0), field_or(request, "top_p", 1.0),
                      field_or<uint64_t>(request, "seed", 1)};
  SB_USER_CHECK(options.sampling.temperature >= 0 && options.sampling.top_p >= 0 && options.sampling.top_p <= 1,
                "temperature {} or top_p {} is out of range", options.sampling.temperature, options.sampling.top_p);
  options.stop_tokens = model.stop_tokens();
  options.goes_on = [](size_t prompt, int32_t token) {
    say({{"prompt", prompt}, {"token", token}});
    std::string line;
    SB_USER_CHECK(std::getline(std::cin, line) && (line == "true" || line == "false"),
                  "a token is answered by true (go on) or false");
    return line == "true";
  };
  return {{"tokens", model.generate(prompts, options)}};
}

Json answer(EvalModel& model, const std::string& line) {
  const Json request = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  SB_USER_CHECK(request.is_object() && request.size() == 1, "a request is an object with one key, score or generate");
  if (request.contains("score")) return score(model, request["score"]);
  if (request.contains("generate")) return generate(model, request["generate"]);
  throw UserError("unknown request \"{}\"; there are score and generate", request.begin().key());
}

void run_serve(const EvalOptions& options) {
  EvalModel model = open_model(options);
  say({{"ready", true}, {"vocab_size", model.config().vocab_size}, {"stop_tokens", model.stop_tokens()}});
  for (std::string line; std::getline(std::cin, line);) {
    try {
      say(answer(model, line));
    } catch (const UserError& error) {
      say({{"error", error.what()}});
    }
  }
}

}  // namespace

void add_eval_serve(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* serve = eval.add_subcommand("serve", "answer requests of another program, JSON lines on standard input");
  add_common(serve, *options, true);
  serve->add_option("--batch", options->batch, "prompts that run together")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  serve->callback([=] { run_serve(*options); });
}

}  // namespace sb
