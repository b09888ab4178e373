#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_rows.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "eval/infinitebench_metrics.h"
#include "eval/longbench_prompt.h"
#include "eval/multiple_choice.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

struct InfiniteBenchOptions {
  BenchmarkFiles files;
  std::string task, prompts;
  bool own_length = false;  // --max-new-tokens was given
};

// InfiniteBench has a file for each task, called as the task.
std::string task_of(const InfiniteBenchOptions& bench) {
  const std::string name = bench.task.empty() ? std::filesystem::path(bench.files.input).stem().string() : bench.task;
  const std::vector<std::string> known = infinitebench::known_tasks();
  SB_USER_CHECK(std::find(known.begin(), known.end(), name) != known.end(),
                "{}: no metric for the task \"{}\"; name one of these with --task: {}", bench.files.input, name,
                fmt::join(known, ", "));
  return name;
}

std::string prompt_of(const Row& row, const std::string& form, const std::vector<std::string>& options) {
  std::string input = row.has("input") ? row.text("input") : "";
  for (size_t i = 0; i < options.size(); ++i) input += fmt::format("\n{}. {}", kChoiceLetters[i], options[i]);
  return longbench::fill(form, row.text("context"), input);
}

void run_infinitebench(EvalOptions options, const InfiniteBenchOptions& bench) {
  const std::string task = task_of(bench);
  std::string form = infinitebench::has_options(task)
                         ? "{context}\n\n{input}\n\nAnswer with the letter of the right option and a point, such as "
                           "\"A.\".\n\nAnswer:"
                         : "{context}\n\n{input}\n";
  if (!bench.prompts.empty()) {
    const auto templates = longbench::read_templates(bench.prompts);
    SB_USER_CHECK(templates.contains(task), "{}: no template for the task \"{}\"", bench.prompts, task);
    form = templates.at(task);
  }
  const std::vector<Row> rows = read_rows(bench.files);
  std::vector<std::string> prompts;
  std::vector<infinitebench::Expected> expected;
  for (const Row& row : rows) {
    infinitebench::Expected& right = expected.emplace_back();
    right.answers = row.values("answer");
    if (infinitebench::has_options(task)) {
      right.options = row.texts("options");
      SB_USER_CHECK(right.options.size() == kChoiceLetters.size(), "{}: {} options, but a question must have {}",
                    row.place, right.options.size(), kChoiceLetters.size());
      try {
        infinitebench::score(task, "", right);
      } catch (const UserError& error) {
        throw UserError("{}: {}", row.place, error.what());
      }
    }
    prompts.push_back(prompt_of(row, form, right.options));
  }
  std::vector<std::string> texts;
  if (bench.files.predictions.empty()) {
    if (!bench.own_length) options.max_new_tokens = infinitebench::answer_tokens(task);
    SB_USER_CHECK(options.max_new_tokens < options.max_tokens,
                  "--max-tokens {}: answers of {} may take {} tokens, which leaves no room for the prompt; raise it",
                  options.max_tokens, task, options.max_new_tokens);
    EvalModel model = open_model_to_run(options);
    Progress progress;
    texts = model.answer(prompts, generation(options),
                         [&](size_t done, size_t all) { show(progress, done, all, "prompts"); },
                         {.chat = options.chat, .cut_middle = true});
    for (std::string& text : texts) text = infinitebench::answer_of(text);
  } else {
    texts = read_predictions(bench.files, rows);
  }
  MeanScore mean;
  Json scored = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const double score = infinitebench::score(task, texts[i], expected[i]);
    mean.add(score);
    scored.push_back({{"index", i}, {"pred", texts[i]}, {"answer", expected[i].answers}, {"score", score}});
  }
  std::printf("%s: %s (%s)\n", bench.files.input.c_str(), mean.text().c_str(), task.c_str());
  Json results = {{"task", "infinitebench"}, {"name", task}};
  results.update(Json::parse(mean.json()));
  results["rows"] = scored;
  write_json(options, results.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void add_eval_infinitebench(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  auto bench = std::make_shared<InfiniteBenchOptions>();
  CLI::App* command = eval.add_subcommand("infinitebench", "InfiniteBench: score files with each task's own metric");
  add_common(command, *options, false);
  add_sampling(command, *options);
  add_files(command, bench->files, "JSONL (id, context, input, answer, options)");
  command->add_option("--task", bench->task, "task name (default: the name of the file)")
      ->check(CLI::IsMember(infinitebench::known_tasks()));
  command->add_option(
      "--prompts", bench->prompts,
      "JSON file with a template for each task, with {context} and {input}; the options are part of the input");
  command->callback([=] {
    bench->own_length = command->get_option("--max-new-tokens")->count() > 0;
    run_infinitebench(*options, *bench);
  });
}

}  // namespace sb
