#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_rows.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "eval/longbench_metrics.h"
#include "eval/longbench_prompt.h"
#include "eval/needle.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> predictions_for(const EvalOptions& options, const BenchmarkFiles& files,
                                         const std::vector<Row>& rows, const std::vector<std::string>& prompts) {
  if (!files.predictions.empty()) return read_predictions(files, rows);
  EvalModel model = open_model_to_run(options);
  Progress progress;
  return model.answer(prompts, generation(options),
                      [&](size_t done, size_t all) { show(progress, done, all, "prompts"); }, {.chat = options.chat});
}

void run_ruler(const EvalOptions& options, const BenchmarkFiles& files, bool part) {
  const std::vector<Row> rows = read_rows(files);
  std::vector<std::string> prompts;
  std::vector<std::vector<std::string>> outputs;
  for (const Row& row : rows) {
    prompts.push_back(row.text("input"));
    outputs.push_back(row.texts("outputs"));
    SB_USER_CHECK(!outputs.back().empty(), "{}: \"outputs\" is empty", row.place);
  }
  const std::vector<std::string> texts = predictions_for(options, files, rows, prompts);
  MeanScore mean;
  Json scored = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const double score = part ? ruler_match_part(texts[i], outputs[i]) : ruler_match_all(texts[i], outputs[i]);
    mean.add(score);
    scored.push_back({{"index", i}, {"pred", texts[i]}, {"score", score}});
  }
  std::printf("%s: %s (string match, %s)\n", files.input.c_str(), mean.text().c_str(), part ? "part" : "all");
  Json results = {{"task", "ruler"}};
  results.update(Json::parse(mean.json()));
  results["rows"] = scored;
  write_json(options, results.dump());
}

struct LongBenchOptions {
  BenchmarkFiles files;
  std::string task, prompts, answer_lengths;
};

// A line of LongBench.
struct LongBenchItem {
  std::string task, prompt;
  std::vector<std::string> answers, classes;
  int64_t answer_tokens = 0;
};

std::vector<LongBenchItem> longbench_items(const std::vector<Row>& rows, const LongBenchOptions& bench,
                                           int64_t answer_tokens) {
  const std::vector<std::string> known = longbench::known_tasks();
  std::map<std::string, std::string> templates;
  if (!bench.prompts.empty()) templates = longbench::read_templates(bench.prompts);
  std::map<std::string, int64_t> lengths;
  if (!bench.answer_lengths.empty()) lengths = longbench::read_answer_lengths(bench.answer_lengths);
  std::vector<LongBenchItem> items;
  for (const Row& row : rows) {
    LongBenchItem& item = items.emplace_back();
    item.task = bench.task.empty() ? row.text("dataset") : bench.task;
    SB_USER_CHECK(std::find(known.begin(), known.end(), item.task) != known.end(),
                  "{}: no metric for the task \"{}\"; the known tasks are {}", row.place, item.task,
                  fmt::join(known, ", "));
    const auto prompt = templates.find(item.task);
    SB_USER_CHECK(templates.empty() || prompt != templates.end(), "{}: no template for the task \"{}\" of {}",
                  bench.prompts, item.task, row.place);
    const auto length = lengths.find(item.task);
    SB_USER_CHECK(lengths.empty() || length != lengths.end(), "{}: no length for the task \"{}\" of {}",
                  bench.answer_lengths, item.task, row.place);
    item.answer_tokens = lengths.empty() ? answer_tokens : length->second;
    item.prompt = longbench::fill(templates.empty() ? "{context}\n\n{input}\n" : prompt->second, row.text("context"),
                                  row.text("input"));
    item.answers = row.texts("answers");
    if (row.has("all_classes")) item.classes = row.texts("all_classes");
  }
  return items;
}

// As the published script asks: prompts that are too long lose their middle.
std::vector<std::string> longbench_answers(const EvalOptions& options, const std::vector<LongBenchItem>& items) {
  EvalModel model = open_model_to_run(options);
  // Answers of one length and form run together.
  std::map<std::pair<int64_t, bool>, std::vector<size_t>> alike;
  for (size_t i = 0; i < items.size(); ++i)
    alike[{items[i].answer_tokens, options.chat && longbench::takes_a_chat(items[i].task)}].push_back(i);
  std::vector<std::string> texts(items.size());
  Progress progress;
  size_t before = 0;
  for (const auto& [form, places] : alike) {
    const auto [length, chat] = form;
    SB_USER_CHECK(length < options.max_tokens,
                  "--max-tokens {}: answers may take {} tokens, which leaves no room for the prompt; raise it",
                  options.max_tokens, length);
    GenerationOptions how = generation(options);
    how.max_new_tokens = length;
    std::vector<std::string> prompts;
    for (const size_t i : places) prompts.push_back(items[i].prompt);
    const std::vector<std::string> answers =
        model.answer(prompts, how, [&](size_t done, size_t) { show(progress, before + done, items.size(), "prompts"); },
                     {.chat = chat, .cut_middle = true});
    for (size_t i = 0; i < places.size(); ++i) texts[places[i]] = answers[i];
    before += places.size();
  }
  return texts;
}

void run_longbench(const EvalOptions& options, const LongBenchOptions& bench) {
  const std::vector<Row> rows = read_rows(bench.files);
  const std::vector<LongBenchItem> items = longbench_items(rows, bench, options.max_new_tokens);
  const std::vector<std::string> texts =
      bench.files.predictions.empty() ? longbench_answers(options, items) : read_predictions(bench.files, rows);
  std::map<std::string, MeanScore> tasks;
  Json scored = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const double score = longbench::score(items[i].task, texts[i], items[i].answers, items[i].classes);
    tasks[items[i].task].add(score);
    scored.push_back({{"index", i}, {"dataset", items[i].task}, {"pred", texts[i]}, {"score", score}});
  }
  // As the benchmark's own table: every task counts alike, however many samples it has.
  double mean = 0, variance = 0;
  bool known = true;  // how far each may be off
  Json by_task = Json::object();
  for (const auto& [name, task] : tasks) {
    if (tasks.size() > 1) std::printf("%-22s %s\n", name.c_str(), task.text().c_str());
    mean += task.mean() / static_cast<double>(tasks.size());
    known = known && task.standard_error();
    variance += std::pow(task.standard_error().value_or(0) / static_cast<double>(tasks.size()), 2);
    by_task[name] = Json::parse(task.json());
  }
  const std::optional<double> error = known ? std::optional(std::sqrt(variance)) : std::nullopt;
  std::printf("%s: %.2f%s over %zu samples%s\n", bench.files.input.c_str(), mean, plus_minus(error).c_str(),
              rows.size(), tasks.size() > 1 ? fmt::format(", the mean of {} tasks", tasks.size()).c_str() : "");
  write_json(options, Json({{"task", "longbench"},
                            {"score", mean},
                            {"standard_error", error ? Json(*error) : Json()},
                            {"tasks", by_task},
                            {"rows", scored}})
                          .dump());
}

}  // namespace

void add_eval_ruler(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* ruler = eval.add_subcommand("ruler", "RULER: score files with index, input, outputs and length");
  auto files = std::make_shared<BenchmarkFiles>();
  auto part = std::make_shared<bool>(false);
  add_common(ruler, *options, false);
  add_sampling(ruler, *options);
  add_files(ruler, *files, "JSONL");
  ruler->add_flag("--part", *part,
                  "count an answer as right if it contains any one of the expected strings (question answering)");
  ruler->callback([=] { run_ruler(*options, *files, *part); });
}

void add_eval_longbench(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* bench = eval.add_subcommand("longbench", "LongBench v1: score files with each task's own metric");
  auto questions = std::make_shared<LongBenchOptions>();
  add_common(bench, *options, false);
  add_sampling(bench, *options);
  add_files(bench, questions->files, "JSONL");
  bench->add_option("--task", questions->task, "task name (default: \"dataset\" of each line)")
      ->check(CLI::IsMember(longbench::known_tasks()));
  bench->add_option("--prompts", questions->prompts,
                    "LongBench's dataset2prompt.json (default: the prompt is the context followed by the input)");
  bench->add_option("--answer-lengths", questions->answer_lengths,
                    "LongBench's dataset2maxlen.json (default: --max-new-tokens for every task)");
  bench->callback([=] { run_longbench(*options, *questions); });
}

}  // namespace sb
