#include <fmt/ranges.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/help_text.h"
#include "cli/number_checks.h"
#include "cli/output_file.h"
#include "core/config/config.h"
#include "core/errors.h"
#include "core/log.h"

namespace {

// The command that the words given so far name, and how it is called.
struct ChosenCommand {
  const CLI::App* app;
  std::string name;
};
ChosenCommand chosen_command(const CLI::App& app) {
  ChosenCommand chosen{&app, app.get_name()};
  while (!chosen.app->get_subcommands().empty()) {
    chosen.app = chosen.app->get_subcommands().front();
    chosen.name += " " + chosen.app->get_name();
  }
  return chosen;
}

std::string suggestion(const std::string& word, const std::vector<std::string>& known) {
  const std::string nearest = sb::nearest_word(word, known);
  return nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest);
}

// What the parser could not use, as an error like all others: it names the word, the nearest known one and the help of
// the command it was meant for, where the parser says "A subcommand is required" of a misspelt one.
[[noreturn]] void explain(const CLI::App& app, const CLI::ParseError& error) {
  const auto [command, name] = chosen_command(app);
  const std::string help = fmt::format(" (see {} --help)", name);
  const std::vector<std::string> rest = command->remaining();
  std::vector<std::string> commands;
  for (const CLI::App* known : command->get_subcommands([](const CLI::App*) { return true; }))
    commands.push_back(known->get_name());
  const std::string all = fmt::format("; choose from {}", fmt::join(commands, ", "));
  if (!commands.empty() && rest.empty()) throw sb::UserError("{}: {}{}{}", name, error.what(), all, help);
  if (!commands.empty() && !rest.front().starts_with('-')) {
    const std::string nearest = suggestion(rest.front(), commands);
    throw sb::UserError("unknown command '{}'{}{}", rest.front(), nearest.empty() ? all : nearest, help);
  }
  const auto option =
      std::find_if(rest.begin(), rest.end(), [](const std::string& word) { return word.starts_with('-'); });
  if (option != rest.end()) {
    const std::string word = option->substr(0, option->find('='));
    std::vector<std::string> known;
    for (const CLI::Option* one : command->get_options())
      for (const std::string& long_name : one->get_lnames()) known.push_back("--" + long_name);
    throw sb::UserError("unknown option '{}'{}{}", word, suggestion(word, known), help);
  }
  throw sb::UserError("{}: {}{}", name, error.what(), help);
}

// The parser takes an option of the program before the command only; people write it anywhere.
std::vector<std::string> with_log_level_first(int argc, char** argv) {
  std::vector<std::string> level, rest;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool named = word == "--log-level" && i + 1 < argc, whole = word.starts_with("--log-level=");
    (named || whole ? level : rest).push_back(word);
    if (named) level.emplace_back(argv[++i]);
  }
  level.insert(level.end(), rest.begin(), rest.end());
  return level;
}

// Below the options of every command: an example, and the pages to read on.
struct Footer {
  const char *command, *example, *pages;
};
constexpr const char *kDataPage = "docs/data.md", *kEvalPage = "docs/evaluation.md";
constexpr Footer kFooters[] = {
    {"init", "--model checkpoints/qwen2.5-0.5b --data data/long", "docs/configuration.md"},
    {"train", "examples/quickstart.yaml --ranks 2", "docs/configuration.md, docs/parallel.md"},
    {"config", "examples/quickstart.yaml --set train.max_steps=100", "docs/configuration.md"},
    {"data", "stats data/long", kDataPage},
    {"data tokenize", "--tokenizer checkpoints/qwen2.5-0.5b --input texts.jsonl --output data/long", kDataPage},
    {"data stats", "data/long", kDataPage},
    {"data check", "data/long --model checkpoints/qwen2.5-0.5b", kDataPage},
    {"data show", "data/long --tokenizer checkpoints/qwen2.5-0.5b --count 2", kDataPage},
    {"data synth", "--task needle_single --sequences 1000 --length 8192 --output data/needles", kDataPage},
    {"data lengths", "--pool chatqa2-like --count 1000 --output lengths.txt", kDataPage},
    {"data merge", "data/books data/code --output data/mixed", kDataPage},
    {"data split", "data/long --output data/long --validation 0.02", kDataPage},
    {"eval", "needle --model runs/quickstart/final --lengths 512,1024", kEvalPage},
    {"eval ppl", "--model runs/run/final --data data/long-validation --max-tokens 32768", kEvalPage},
    {"eval needle", "--model runs/quickstart/final --lengths 512,1024 --svg needles.svg", kEvalPage},
    {"eval ruler", "--model runs/run/final --input niah.jsonl --max-tokens 32768", kEvalPage},
    {"eval longbench", "--model runs/run/final --input qasper.jsonl --max-tokens 32768", kEvalPage},
    {"eval longbench2", "--model runs/run/final --input data.json --max-tokens 131072", kEvalPage},
    {"eval infinitebench", "--model runs/run/final --input passkey.jsonl --max-tokens 131072", kEvalPage},
    {"eval generate", "--model runs/run/final --prompt 'Once upon a time'", kEvalPage},
    {"eval serve", "--model runs/run/final --max-tokens 32768", kEvalPage},
    {"merge", "checkpoints/qwen2.5-3b runs/lora/final merged", "docs/lora.md"},
    {"profile", "--run run.yaml --out profile.json", "docs/balancing.md"},
    {"simulate", "--model qwen2.5-3b --profile h200 --dp 2 --pp 4", "docs/balancing.md, docs/results/simulate.md"},
    {"report", "runs/balanced", "docs/balancing.md"},
    {"bench", "attention --seq 16384 --density 0.1", "docs/attention.md"},
    {"bench attention", "--seq 16384 --density 0.1 --score planes", "docs/attention.md"},
};

void add_footers(CLI::App& app) {
  for (const auto& [command, example, pages] : kFooters) {
    CLI::App* named = &app;
    std::istringstream words(command);
    for (std::string word; words >> word;) named = named->get_subcommand(word);
    named->footer(fmt::format("Example: sparsebalance {} {}\nSee also: {}", command, example, pages));
  }
}

int run(int argc, char** argv) {
  CLI::App app{"SparseBalance: train long-context language models with sparse attention and balanced steps",
               "sparsebalance"};
  sb::set_help_format(app);
  app.set_version_flag("--version", "sparsebalance " SB_VERSION " (" SB_BUILD ")", "print the version and exit");
  app.require_subcommand(1);
  std::string level = "info";
  const std::map<std::string, sb::log::Level> levels{{"debug", sb::log::Level::debug},
                                                     {"info", sb::log::Level::info},
                                                     {"warning", sb::log::Level::warning},
                                                     {"error", sb::log::Level::error}};
  app.add_option("--log-level", level, "least severe messages to log")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->capture_default_str();
  app.parse_complete_callback([&] { sb::log::set_level(levels.at(level)); });

  sb::add_init_command(app);
  sb::add_train_command(app);
  sb::add_config_command(app);
  sb::add_data_command(app);
  sb::add_eval_command(app);
  sb::add_merge_command(app);
  sb::add_profile_command(app);
  sb::add_simulate_command(app);
  sb::add_report_command(app);
  sb::add_bench_command(app);
  sb::add_doctor_command(app);
  sb::add_shell_commands(app);
  sb::check_numbers(app);
  // After the commands, which would take it over.
  app.footer(
      "`sparsebalance SUBCOMMAND --help` lists the options of a command. docs/ has a page on each subject;\n"
      "docs/configuration.md lists every option of run.yaml.\n"
      "Exit codes: 0 success, 1 another rank was lost, 2 error in the input, 3 out of memory, 70 internal error.");
  add_footers(app);

  try {
    std::vector<std::string> words = with_log_level_first(argc, argv);
    std::reverse(words.begin(), words.end());  // as the parser takes them
    app.parse(std::move(words));
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) explain(app, error);
    return app.exit(error);  // the help or the version
  }
  return 0;
}

// A command whose output is not all there has not succeeded.
int run_and_check_output(int argc, char** argv) {
  sb::occupy_closed_descriptors();
  try {
    const int code = run(argc, argv);
    if (code == 0) sb::check_standard_output();
    return code;
  } catch (const std::system_error& error) {
    sb::check_standard_output(error.code().value());  // fmt::print throws when a full buffer cannot be written
    throw;
  }
}

// OpenBLAS starts threads as it is loaded, each of which asks for a buffer, without an end where the system refuses it:
// under a limit of address space (ulimit -v) the program starts itself again with none of them. It has its own.
void start_without_openblas_threads(char** argv) {
  constexpr const char* kThreads = "OPENBLAS_NUM_THREADS";
  rlimit limit = {};
  if (std::getenv(kThreads) != nullptr || ::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return;
  ::setenv(kThreads, "1", 1);
  ::execv("/proc/self/exe", argv);  // where that fails, as it is
}

}  // namespace

int main(int argc, char** argv) {
  start_without_openblas_threads(argv);
  // A file-size limit is to be an error that names the file, like a full disk, and not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return run_and_check_output(argc, argv);
  } catch (const std::exception& error) {
    const int code = sb::exit_code(error);
    if (const auto* path = dynamic_cast<const std::filesystem::filesystem_error*>(&error))
      std::fprintf(stderr, "error: %s: %s\n", path->path1().c_str(), path->code().message().c_str());
    else if (sb::no_more_threads(error))
      std::fprintf(stderr, "error: the system cannot start more threads: raise the limit of processes (ulimit -u)\n");
    else if (code == sb::kUserErrorCode)
      std::fprintf(stderr, "error: %s\n", error.what());
    else if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
      std::fprintf(stderr, "out of memory: an allocation failed\n");
    else if (dynamic_cast<const sb::OutOfMemory*>(&error) != nullptr)
      std::fprintf(stderr, "out of memory: %s\n", error.what());
    else
      std::fprintf(stderr, "%s%s\n", code == 1 ? "" : "internal error (please report it): ", error.what());
    return code;
  }
}
