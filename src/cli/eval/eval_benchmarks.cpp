#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_options.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/files/regular_file.h"
#include "eval/longbench_metrics.h"
#include "eval/longbench_prompt.h"
#include "eval/needle.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

// An object of a JSONL file and where it stands.
struct Row {
  Json object;
  int64_t line = 0;
};

// The objects of a JSONL file; a bad line is a UserError with its number.
std::vector<Row> read_jsonl(const std::string& path) {
  std::istringstream file(read_regular_file(path));
  std::vector<Row> rows;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      rows.push_back({Json::parse(line), number});
    } catch (const nlohmann::json::exception& error) {
      throw UserError("{}:{}: not a JSON object: {}", path, number, error.what());
    }
    SB_USER_CHECK(rows.back().object.is_object(), "{}:{}: not a JSON object", path, number);
  }
  SB_USER_CHECK(!rows.empty(), "{}: holds no lines", path);
  return rows;
}

template <typename T>
T field(const Row& row, const char* key, const std::string& path) {
  try {
    return row.object.at(key).get<T>();
  } catch (const nlohmann::json::exception&) {
    throw UserError("{}:{}: key \"{}\" is missing or of another type", path, row.line, key);
  }
}

// Predictions of a file ("pred"), one for each of the rows.
std::vector<std::string> read_predictions(const std::string& file, const std::vector<Row>& rows) {
  const std::vector<Row> given = read_jsonl(file);
  SB_USER_CHECK(given.size() == rows.size(), "{}: {} predictions for {} lines", file, given.size(), rows.size());
  std::vector<std::string> texts;
  for (const Row& row : given) texts.push_back(field<std::string>(row, "pred", file));
  return texts;
}

EvalModel open_model_to_run(const EvalOptions& options) {
  SB_USER_CHECK(!options.model.empty(), "name a --model to run, or --predictions to score");
  return open_model(options);
}

std::vector<std::string> predictions_for(const EvalOptions& options, const std::string& file,
                                         const std::vector<Row>& rows, const std::vector<std::string>& prompts) {
  if (!file.empty()) return read_predictions(file, rows);
  EvalModel model = open_model_to_run(options);
  Progress progress;
  return model.answer(prompts, generation(options),
                      [&](size_t done, size_t all) { show(progress, done, all, "prompts"); }, {.chat = options.chat});
}

void run_ruler(const EvalOptions& options, const std::string& input, const std::string& predictions, bool part) {
  const std::vector<Row> rows = read_jsonl(input);
  std::vector<std::string> prompts;
  std::vector<std::vector<std::string>> outputs;
  for (const Row& row : rows) {
    prompts.push_back(field<std::string>(row, "input", input));
    outputs.push_back(field<std::vector<std::string>>(row, "outputs", input));
    SB_USER_CHECK(!outputs.back().empty(), "{}:{}: \"outputs\" is empty", input, row.line);
  }
  const std::vector<std::string> texts = predictions_for(options, predictions, rows, prompts);
  double sum = 0;
  Json scored = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const double score = part ? ruler_match_part(texts[i], outputs[i]) : ruler_match_all(texts[i], outputs[i]);
    sum += score;
    scored.push_back({{"index", i}, {"pred", texts[i]}, {"score", score}});
  }
  const double mean = 100 * sum / static_cast<double>(rows.size());
  std::printf("%s: %.2f over %zu samples (string match, %s)\n", input.c_str(), mean, rows.size(),
              part ? "part" : "all");
  write_json(options, Json({{"task", "ruler"}, {"score", mean}, {"rows", scored}}).dump());
}

struct LongBenchOptions {
  std::string input, predictions, task, prompts, answer_lengths;
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
  const std::string& input = bench.input;
  std::map<std::string, std::string> templates;
  if (!bench.prompts.empty()) templates = longbench::read_templates(bench.prompts);
  std::map<std::string, int64_t> lengths;
  if (!bench.answer_lengths.empty()) lengths = longbench::read_answer_lengths(bench.answer_lengths);
  std::vector<LongBenchItem> items;
  for (const Row& row : rows) {
    LongBenchItem& item = items.emplace_back();
    item.task = bench.task.empty() ? field<std::string>(row, "dataset", input) : bench.task;
    SB_USER_CHECK(std::find(known.begin(), known.end(), item.task) != known.end(),
                  "{}:{}: the task \"{}\" has no metric here; known are {}", input, row.line, item.task,
                  fmt::join(known, ", "));
    const auto prompt = templates.find(item.task);
    SB_USER_CHECK(templates.empty() || prompt != templates.end(), "{}: no template for the task \"{}\" of {}:{}",
                  bench.prompts, item.task, input, row.line);
    const auto length = lengths.find(item.task);
    SB_USER_CHECK(lengths.empty() || length != lengths.end(), "{}: no length for the task \"{}\" of {}:{}",
                  bench.answer_lengths, item.task, input, row.line);
    item.answer_tokens = lengths.empty() ? answer_tokens : length->second;
    item.prompt = longbench::fill(templates.empty() ? "{context}\n\n{input}\n" : prompt->second,
                                  field<std::string>(row, "context", input), field<std::string>(row, "input", input));
    item.answers = field<std::vector<std::string>>(row, "answers", input);
    if (row.object.contains("all_classes") && !row.object["all_classes"].is_null())
      item.classes = field<std::vector<std::string>>(row, "all_classes", input);
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
                  "--max-tokens {}: answers have up to {} tokens, so that nothing is left for the prompt",
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
  const std::vector<Row> rows = read_jsonl(bench.input);
  const std::vector<LongBenchItem> items = longbench_items(rows, bench, options.max_new_tokens);
  const std::vector<std::string> texts =
      bench.predictions.empty() ? longbench_answers(options, items) : read_predictions(bench.predictions, rows);
  struct TaskScore {
    double sum = 0;
    int64_t samples = 0;
    double mean() const { return 100 * sum / static_cast<double>(samples); }
  };
  std::map<std::string, TaskScore> tasks;
  Json scored = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const double score = longbench::score(items[i].task, texts[i], items[i].answers, items[i].classes);
    tasks[items[i].task].sum += score;
    ++tasks[items[i].task].samples;
    scored.push_back({{"index", i}, {"dataset", items[i].task}, {"pred", texts[i]}, {"score", score}});
  }
  // As the benchmark's own table: every task counts alike, however many samples it has.
  double mean = 0;
  Json by_task = Json::object();
  for (const auto& [name, task] : tasks) {
    if (tasks.size() > 1)
      std::printf("%-22s %6.2f over %lld samples\n", name.c_str(), task.mean(), static_cast<long long>(task.samples));
    mean += task.mean() / static_cast<double>(tasks.size());
    by_task[name] = {{"score", task.mean()}, {"samples", task.samples}};
  }
  std::printf("%s: %.2f over %zu samples%s\n", bench.input.c_str(), mean, rows.size(),
              tasks.size() > 1 ? fmt::format(", the mean of {} tasks", tasks.size()).c_str() : "");
  write_json(options, Json({{"task", "longbench"}, {"score", mean}, {"tasks", by_task}, {"rows", scored}}).dump());
}

}  // namespace

void add_eval_ruler(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* ruler = eval.add_subcommand("ruler", "RULER-layout files (index, input, outputs, length)");
  auto input = std::make_shared<std::string>(), predictions = std::make_shared<std::string>();
  auto part = std::make_shared<bool>(false);
  add_common(ruler, *options, false);
  add_sampling(ruler, *options);
  ruler->add_option("--input", *input, "JSONL")->required();
  ruler->add_option("--predictions", *predictions, "JSONL with \"pred\" per line, to score instead of running a model");
  ruler->add_flag("--part", *part, "one of the expected strings is enough (question answering)");
  ruler->callback([=] { run_ruler(*options, *input, *predictions, *part); });
}

void add_eval_longbench(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* bench = eval.add_subcommand("longbench", "LongBench v1 files with each task's own metric");
  auto questions = std::make_shared<LongBenchOptions>();
  add_common(bench, *options, false);
  add_sampling(bench, *options);
  bench->add_option("--input", questions->input, "JSONL")->required();
  bench->add_option("--predictions", questions->predictions,
                    "JSONL with \"pred\" per line, to score instead of running a model");
  bench->add_option("--task", questions->task, "task name; otherwise every line's \"dataset\"")
      ->check(CLI::IsMember(longbench::known_tasks()));
  bench->add_option("--prompts", questions->prompts,
                    "LongBench's dataset2prompt.json; without it a prompt is the context and the input");
  bench->add_option("--answer-lengths", questions->answer_lengths,
                    "LongBench's dataset2maxlen.json; without it --max-new-tokens");
  bench->callback([=] { run_longbench(*options, *questions); });
}

}  // namespace sb
