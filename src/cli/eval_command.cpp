#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/at_least.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/log.h"
#include "data/ruler_text.h"
#include "data/synthetic.h"
#include "data/token_dataset.h"
#include "eval/eval_model.h"
#include "eval/longbench_metrics.h"
#include "eval/longbench_prompt.h"
#include "eval/needle.h"
#include "eval/perplexity.h"
#include "train/checkpoint.h"
#include "train/run_config.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// What every evaluation takes.
struct EvalOptions {
  std::string model, attention = "dense", run_config, json, device = "cpu", precision = "auto";
  int64_t max_tokens = 4096, max_new_tokens = 64;
  int batch = 1, threads = 0;
  bool chat = false;
  double temperature = 0, top_p = 1;
  uint64_t seed = 1;
};

// --model without the slash that shells complete with, so that what it lies in is its parent.
fs::path model_folder(const EvalOptions& options) {
  const fs::path model = fs::absolute(options.model).lexically_normal();
  return model.has_filename() ? model : model.parent_path();
}

// run.yaml lies beside a checkpoint's weights, or in the run's folder beside the final model.
fs::path find_run_config(const EvalOptions& options) {
  if (!options.run_config.empty()) return options.run_config;
  const fs::path model = model_folder(options);
  for (const fs::path& candidate : {model / "run.yaml", model.parent_path() / "run.yaml"}) {
    if (fs::exists(candidate)) return candidate;
  }
  throw UserError("--attention as-trained: no run.yaml in {} or beside it; name it with --run-config", options.model);
}

// A checkpoint has them beside its weights. The final model is what the run's newest checkpoint holds.
Selector::Thresholds find_thresholds(const EvalOptions& options) {
  const fs::path folder = model_folder(options);
  if (fs::exists(folder / "state.json")) return read_thresholds(folder);
  const fs::path run = folder.parent_path();
  const std::vector<int64_t> steps = fs::is_directory(run) ? checkpoint_steps(run) : std::vector<int64_t>();
  if (folder.filename() == "final" && !steps.empty()) return read_thresholds(checkpoint_path(run, steps.back()));
  log::warning(
      "the thresholds that attention.pattern mass had learned are not there (a checkpoint's state.json has them): it "
      "begins as in the first step of training");
  return {};
}

EvalModel open_model(const EvalOptions& options) {
  check_output(options.json);
  const fs::path named = options.model;
  SB_USER_CHECK(fs::exists(named / "config.json") || !fs::exists(named / "final" / "config.json"),
                "--model {}: this is a run's folder; its trained model is {}", options.model,
                (named / "final").string());
  EvalModelOptions model;
  model.model = options.model;
  model.max_tokens = options.max_tokens;
  model.batch = options.batch;
  model.threads = options.threads;
  if (options.device == "cuda") {
    model.device = DeviceKind::cuda;
    if (options.precision == "auto") model.dtype = DType::bf16;
  }
  if (options.attention == "as-trained") {
    model.attention = load_run_config(find_run_config(options)).attention.selection;
    if (model.attention->pattern == SelectionPattern::mass && model.attention->order == SelectionOrder::causal)
      model.thresholds = find_thresholds(options);
  }
  return EvalModel(model);
}

GenerationOptions generation(const EvalOptions& options) {
  GenerationOptions result;
  result.max_new_tokens = options.max_new_tokens;
  result.sampling = {options.temperature, options.top_p, options.seed};
  return result;
}

void write_json(const EvalOptions& options, Json result) {
  if (options.json.empty()) return;
  result["model"] = options.model;
  result["attention"] = options.attention;
  result["device"] = options.device;
  write_output(options.json, result.dump(1) + "\n");
}

// "12 of 40", for each of what `all` says.
void show(Progress& progress, size_t done, size_t all, const char* what) {
  progress.show(static_cast<double>(done) / static_cast<double>(all), fmt::format("{} of {} {}", done, all, what));
}

// An object of a JSONL file and where it stands.
struct Row {
  Json object;
  int64_t line = 0;
};

// The objects of a JSONL file; a bad line is a UserError with its number.
std::vector<Row> read_jsonl(const std::string& path) {
  std::ifstream file(path);
  SB_USER_CHECK(file.good(), "{}: cannot be read", path);
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

void run_ppl(const EvalOptions& options, const std::vector<std::string>& data, int64_t sequences) {
  EvalModel model = open_model(options);
  TokenDatasetOptions files;
  files.paths = data;
  files.max_sequence_length = options.max_tokens;
  files.shuffle = false;
  files.vocab_size = model.config().vocab_size;
  const TokenDataset dataset(files, options.seed);
  const auto count = static_cast<int64_t>(dataset.size());
  const int64_t chosen = sequences > 0 ? std::min(sequences, count) : count;
  PositionLosses losses;
  Progress progress;
  for (int64_t i = 0; i < chosen; ++i) {
    const TokenSequence sequence = dataset.read(static_cast<uint64_t>(i));
    losses.add(model.score(sequence.tokens, sequence.labels).token_loss, sequence.labels);
    show(progress, static_cast<size_t>(i + 1), static_cast<size_t>(chosen), "sequences");
  }
  progress.clear();
  std::printf("%18s %12s %10s %12s\n", "positions", "tokens", "loss", "perplexity");
  Json rows = Json::array();
  const auto print = [&](const PositionLosses::Bucket& bucket, const std::string& name) {
    const double loss = bucket.tokens == 0 ? 0.0 : bucket.loss / static_cast<double>(bucket.tokens);
    std::printf("%18s %12lld %10.4f %12.4f\n", name.c_str(), static_cast<long long>(bucket.tokens), loss,
                bucket.perplexity());
    rows.push_back(
        {{"positions", name}, {"tokens", bucket.tokens}, {"loss", loss}, {"perplexity", bucket.perplexity()}});
  };
  for (const PositionLosses::Bucket& bucket : losses.buckets()) {
    print(bucket, fmt::format("{}-{}", bucket.begin, bucket.end - 1));
  }
  print(losses.total(), "all");
  write_json(options, {{"task", "ppl"}, {"rows", rows}});
}

struct NeedleOptions {
  std::vector<int64_t> lengths = {1024, 2048, 4096};
  std::vector<double> depths = {0.0, 0.25, 0.5, 0.75};
  int64_t samples = 4, vocab = 0;
  std::string svg;
};

// Over text when the model has a tokenizer: the answer is generated and has to contain the number. Over token ids
// otherwise: every token of the answer has to be the most likely one.
double needle_cell(EvalModel& model, const EvalOptions& options, const NeedleOptions& needle, int64_t length,
                   double depth) {
  double found = 0;
  if (model.has_tokenizer()) {
    RulerOptions ruler;
    ruler.length = length;
    ruler.depth = depth;
    std::vector<std::string> prompts;
    std::vector<std::vector<std::string>> outputs;
    for (int64_t i = 0; i < needle.samples; ++i) {
      const RulerSample sample = make_ruler_sample(
          ruler, [&](std::string_view text) { return std::ssize(model.tokenizer().encode(text)); }, options.seed, i);
      prompts.push_back(sample.input);
      outputs.push_back(sample.outputs);
    }
    const std::vector<std::string> answers = model.answer(prompts, generation(options), {}, {.chat = options.chat});
    for (size_t i = 0; i < answers.size(); ++i) found += ruler_match_all(answers[i], outputs[i]);
  } else {
    SyntheticOptions task;
    task.task = SyntheticTask::needle_single;
    task.vocab_size = needle.vocab > 0 ? needle.vocab : model.config().vocab_size;
    task.length = LengthDistribution::fixed(length);
    task.depth = depth;
    const auto source = make_synthetic_source(task, options.seed);
    for (int64_t i = 0; i < needle.samples; ++i) {
      const TokenSequence sequence = source->read(static_cast<uint64_t>(i));
      const LossSums sums = model.score(sequence.tokens, sequence.labels).sums;
      found += sums.correct == sums.targets ? 1.0 : 0.0;
    }
  }
  return found / static_cast<double>(needle.samples);
}

void run_needle(EvalOptions options, const NeedleOptions& needle) {
  check_output(needle.svg);
  for (const int64_t length : needle.lengths) options.max_tokens = std::max(options.max_tokens, length);
  EvalModel model = open_model(options);
  NeedleGrid grid{needle.depths, needle.lengths, {}};
  Progress progress;
  size_t done = 0;
  const size_t cells = needle.depths.size() * needle.lengths.size();
  for (const double depth : needle.depths) {
    std::vector<double>& row = grid.values.emplace_back();
    for (const int64_t length : needle.lengths) {
      row.push_back(needle_cell(model, options, needle, length, depth));
      show(progress, ++done, cells, "cells");
    }
  }
  progress.clear();
  std::printf("%s", needle_table(grid).c_str());
  if (!needle.svg.empty()) write_output(needle.svg, needle_svg(grid, "needle: " + options.model));
  write_json(options, {{"task", "needle"},
                       {"depths", grid.depths},
                       {"lengths", grid.lengths},
                       {"values", grid.values},
                       {"mean", grid.mean()}});
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
  write_json(options, {{"task", "ruler"}, {"score", mean}, {"rows", scored}});
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
  double sum = 0;
  Json scored = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const double score = longbench::score(items[i].task, texts[i], items[i].answers, items[i].classes);
    sum += score;
    scored.push_back({{"index", i}, {"dataset", items[i].task}, {"pred", texts[i]}, {"score", score}});
  }
  const double mean = 100 * sum / static_cast<double>(rows.size());
  std::printf("%s: %.2f over %zu samples\n", bench.input.c_str(), mean, rows.size());
  write_json(options, {{"task", "longbench"}, {"score", mean}, {"rows", scored}});
}

void run_generate(const EvalOptions& options, const std::vector<std::string>& prompts, bool token_ids) {
  EvalModel model = open_model(options);
  Json rows = Json::array();
  if (token_ids) {
    std::vector<std::vector<int32_t>> tokens;
    for (const std::string& prompt : prompts) {
      std::istringstream words(prompt);
      std::vector<int32_t>& ids = tokens.emplace_back();
      for (int32_t id; words >> id;) ids.push_back(id);
      SB_USER_CHECK(words.eof(), "--prompt \"{}\": with --token-ids a prompt is numbers with blanks between", prompt);
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
  write_json(options, {{"task", "generate"}, {"rows", rows}});
}

void add_common(CLI::App* command, EvalOptions& options, bool model_required) {
  auto* model = command->add_option("--model", options.model, "Hugging Face directory of the model");
  if (model_required) model->required();
  command->add_option("--attention", options.attention, "dense, or as-trained (the pattern of the run's run.yaml)")
      ->check(CLI::IsMember({"dense", "as-trained"}))
      ->capture_default_str();
  command->add_option("--run-config", options.run_config, "run.yaml for as-trained, where it is not beside the model");
  command->add_option("--max-tokens", options.max_tokens, "longest sequence, prompt and answer together")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--device", options.device, "where the model runs")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--precision", options.precision, "of weights and activations; auto: bfloat16 on cuda")
      ->check(CLI::IsMember({"auto", "float32"}))
      ->capture_default_str();
  command->add_option("--threads", options.threads, "threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--seed", options.seed, "of samples and of sampling")->capture_default_str();
  command->add_option("--json", options.json, "also write the results to this file");
}

void add_sampling(CLI::App* command, EvalOptions& options) {
  command->add_option("--max-new-tokens", options.max_new_tokens, "most tokens of an answer")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--batch", options.batch, "prompts that run together")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_flag("--chat", options.chat,
                    "a prompt is the user's message in a chat, as in `messages` of data tokenize");
  command->add_option("--temperature", options.temperature, "0: the most likely token")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-p", options.top_p, "sample from the fewest tokens that hold this probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

}  // namespace

void add_eval_command(CLI::App& app) {
  CLI::App* eval = app.add_subcommand("eval", "ask a trained model: perplexity, needles, RULER, LongBench, generation");
  eval->require_subcommand(1);
  auto options = std::make_shared<EvalOptions>();

  CLI::App* ppl = eval->add_subcommand("ppl", "perplexity of token files, by position");
  auto data = std::make_shared<std::vector<std::string>>();
  auto sequences = std::make_shared<int64_t>(0);
  add_common(ppl, *options, true);
  ppl->add_option("--data", *data, "prefixes of .bin/.idx, or llm.c .bin files")->required();
  ppl->add_option("--sequences", *sequences, "at most so many; 0: all")
      ->check(at_least(0), "NONNEGATIVE")
      ->capture_default_str();
  ppl->callback([=] { run_ppl(*options, *data, *sequences); });

  CLI::App* needle = eval->add_subcommand("needle", "find one fact: depth by length");
  auto grid = std::make_shared<NeedleOptions>();
  add_common(needle, *options, true);
  add_sampling(needle, *options);
  needle->add_option("--lengths", grid->lengths, "tokens")->delimiter(',')->capture_default_str();
  needle->add_option("--depths", grid->depths, "0 (start) to 1 (end)")->delimiter(',')->capture_default_str();
  needle->add_option("--samples", grid->samples, "per cell")->check(CLI::Range(1, 100000))->capture_default_str();
  needle->add_option("--vocab", grid->vocab, "token ids in use, for models without a tokenizer; 0: the model's");
  needle->add_option("--svg", grid->svg, "also write a heat map");
  needle->callback([=] { run_needle(*options, *grid); });

  auto input = std::make_shared<std::string>(), predictions = std::make_shared<std::string>();
  CLI::App* ruler = eval->add_subcommand("ruler", "RULER-layout files (index, input, outputs, length)");
  auto part = std::make_shared<bool>(false);
  add_common(ruler, *options, false);
  add_sampling(ruler, *options);
  ruler->add_option("--input", *input, "JSONL")->required();
  ruler->add_option("--predictions", *predictions, "JSONL with \"pred\" a line, to score instead of running a model");
  ruler->add_flag("--part", *part, "one of the expected strings is enough (question answering)");
  ruler->callback([=] { run_ruler(*options, *input, *predictions, *part); });

  CLI::App* bench = eval->add_subcommand("longbench", "LongBench v1 files with each task's own metric");
  auto questions = std::make_shared<LongBenchOptions>();
  add_common(bench, *options, false);
  add_sampling(bench, *options);
  bench->add_option("--input", questions->input, "JSONL")->required();
  bench->add_option("--predictions", questions->predictions,
                    "JSONL with \"pred\" a line, to score instead of running a model");
  bench->add_option("--task", questions->task, "task name; otherwise every line's \"dataset\"")
      ->check(CLI::IsMember(longbench::known_tasks()));
  bench->add_option("--prompts", questions->prompts,
                    "LongBench's dataset2prompt.json; without it a prompt is the context and the input");
  bench->add_option("--answer-lengths", questions->answer_lengths,
                    "LongBench's dataset2maxlen.json; without it --max-new-tokens");
  bench->callback([=] { run_longbench(*options, *questions); });

  CLI::App* generate = eval->add_subcommand("generate", "continue prompts");
  auto prompts = std::make_shared<std::vector<std::string>>();
  auto token_ids = std::make_shared<bool>(false);
  add_common(generate, *options, true);
  add_sampling(generate, *options);
  generate->add_option("--prompt", *prompts, "text; may be repeated")->required();
  generate->add_flag("--token-ids", *token_ids, "prompts and answers are token ids (models without a tokenizer)")
      ->excludes("--chat");
  generate->callback([=] { run_generate(*options, *prompts, *token_ids); });
}

}  // namespace sb
