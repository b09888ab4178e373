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

const Json& field(const Json& object, const char* key) {
  SB_USER_CHECK(object.is_object() && object.contains(key), "key \"{}\" is missing", key);
  return object[key];
}

const Json& list(const Json& object, const char* key) {
  const Json& value = field(object, key);
  SB_USER_CHECK(value.is_array(), "key \"{}\" must be a list", key);
  return value;
}

double number_or(const Json& object, const char* key, double otherwise) {
  if (!object.contains(key)) return otherwise;
  SB_USER_CHECK(object[key].is_number(), "key \"{}\" must be a number", key);
  return object[key].get<double>();
}

// Converting cuts off fractions and what does not fit without a word, so that is looked at before.
int64_t integer(const Json& value, const char* what, int64_t least, int64_t most) {
  const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX) &&
                    least <= value.get<int64_t>() && value.get<int64_t>() <= most;
  SB_USER_CHECK(fits, "{} is {}, but must be an integer from {} to {}", what, value.dump(), least, most);
  return value.get<int64_t>();
}

uint64_t seed_of(const Json& request) {
  if (!request.contains("seed")) return 1;
  SB_USER_CHECK(request["seed"].is_number_unsigned(), "seed is {}, but must be an integer from 0 to {}",
                request["seed"].dump(), UINT64_MAX);
  return request["seed"].get<uint64_t>();
}

std::vector<int32_t> tokens_of(const Json& values, int64_t vocab_size) {
  SB_USER_CHECK(values.is_array(), "a prompt must be a list of tokens");
  std::vector<int32_t> tokens;
  for (const Json& value : values) tokens.push_back(static_cast<int32_t>(integer(value, "a token", 0, vocab_size - 1)));
  return tokens;
}

// The last `targets` tokens, given those before them.
Json score(EvalModel& model, const Json& request) {
  std::vector<int32_t> tokens = tokens_of(list(request, "tokens"), model.config().vocab_size);
  SB_USER_CHECK(tokens.size() >= 2, "{} tokens; the first cannot be a target, so there must be at least two",
                tokens.size());
  const int64_t targets = integer(field(request, "targets"), "targets", 1, std::ssize(tokens) - 1);
  std::vector<int32_t> labels(tokens.begin() + 1, tokens.end());
  tokens.pop_back();
  std::fill(labels.begin(), labels.end() - targets, kIgnoredLabel);
  const LossSums sums = model.score(tokens, labels).sums;
  return {{"loglikelihood", -sums.nll}, {"greedy", sums.correct == sums.targets}};
}

// Says every token as it comes and is told whether its prompt goes on.
Json generate(EvalModel& model, int64_t max_tokens, const Json& request) {
  std::vector<std::vector<int32_t>> prompts;
  for (const Json& prompt : list(request, "prompts")) prompts.push_back(tokens_of(prompt, model.config().vocab_size));
  GenerationOptions options;
  options.max_new_tokens = integer(field(request, "max_new_tokens"), "max_new_tokens", 1, max_tokens);
  options.sampling = {number_or(request, "temperature", 0.0), number_or(request, "top_p", 1.0), seed_of(request)};
  SB_USER_CHECK(options.sampling.temperature >= 0 && options.sampling.top_p >= 0 && options.sampling.top_p <= 1,
                "temperature {} or top_p {} is out of range", options.sampling.temperature, options.sampling.top_p);
  options.stop_tokens = model.stop_tokens();
  options.goes_on = [](size_t prompt, int32_t token) {
    say({{"prompt", prompt}, {"token", token}});
    std::string line;
    SB_USER_CHECK(std::getline(std::cin, line) && (line == "true" || line == "false"),
                  "each token must be answered with true (go on) or false");
    return line == "true";
  };
  return {{"tokens", model.generate(prompts, options)}};
}

Json answer(EvalModel& model, int64_t max_tokens, const std::string& line) {
  const Json request = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  SB_USER_CHECK(request.is_object() && request.size() == 1, "a request is an object with one key, score or generate");
  if (request.contains("score")) return score(model, request["score"]);
  if (request.contains("generate")) return generate(model, max_tokens, request["generate"]);
  throw UserError("unknown request \"{}\"; expected score or generate", request.begin().key());
}

void run_serve(const EvalOptions& options) {
  EvalModel model = open_model(options);
  say({{"ready", true}, {"vocab_size", model.config().vocab_size}, {"stop_tokens", model.stop_tokens()}});
  for (std::string line; std::getline(std::cin, line);) {
    try {
      say(answer(model, options.max_tokens, line));
    } catch (const UserError& error) {
      say({{"error", error.what()}});
    }
  }
}

}  // namespace

void add_eval_serve(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* serve =
      eval.add_subcommand("serve", "answer requests from another program, as JSON lines on standard input and output");
  add_common(serve, *options, true);
  serve->add_option("--batch", options->batch, "number of prompts to run at once")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  serve->callback([=] { run_serve(*options); });
}

}  // namespace sb
