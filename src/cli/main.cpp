#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/exit_code.h"
#include "core/config.h"
#include "core/errors.h"
#include "core/log.h"

namespace {

// The parser answers a misspelt command with "A subcommand is required"; this names the word and the nearest command.
void explain_unknown_command(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  const std::vector<std::string> rest = command->remaining();
  if (rest.empty() || rest.front().starts_with('-')) return;
  std::vector<std::string> names;
  for (const CLI::App* known : command->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(known->get_name());
  }
  if (names.empty()) return;
  const std::string nearest = sb::nearest_word(rest.front(), names);
  throw sb::UserError("unknown command '{}'; {}", rest.front(),
                      nearest.empty() ? fmt::format("known are {}", fmt::join(names, ", "))
                                      : fmt::format("did you mean '{}'?", nearest));
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

int run(int argc, char** argv) {
  CLI::App app{"SparseBalance: trains long-context language models", "sparsebalance"};
  app.set_version_flag("--version", SB_VERSION);
  app.require_subcommand(1);
  auto level = sb::log::Level::info;
  const std::map<std::string, sb::log::Level> levels{{"debug", sb::log::Level::debug},
                                                     {"info", sb::log::Level::info},
                                                     {"warning", sb::log::Level::warning},
                                                     {"error", sb::log::Level::error}};
  app.add_option("--log-level", level, "what is logged: debug, info, warning or error")
      ->transform(CLI::CheckedTransformer(levels))
      ->option_text("LEVEL");
  app.parse_complete_callback([&level] { sb::log::set_level(level); });

  sb::add_train_command(app);
  sb::add_bench_command(app);
  sb::add_eval_command(app);
  sb::add_config_command(app);
  sb::add_profile_command(app);
  sb::add_simulate_command(app);
  sb::add_report_command(app);
  sb::add_data_command(app);

  try {
    std::vector<std::string> words = with_log_level_first(argc, argv);
    std::reverse(words.begin(), words.end());  // as the parser takes them
    app.parse(std::move(words));
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) explain_unknown_command(app);
    return app.exit(error) == 0 ? 0 : sb::kUserErrorCode;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    const int code = sb::exit_code(error);
    if (const auto* path = dynamic_cast<const std::filesystem::filesystem_error*>(&error))
      std::fprintf(stderr, "error: %s: %s\n", path->path1().c_str(), path->code().message().c_str());
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
