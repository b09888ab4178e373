#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <map>
#include <new>

#include "cli/commands.h"
#include "core/errors.h"
#include "core/log.h"

namespace {

// Exit codes; 0 is success. 2 is also what wrong arguments give, 70 is EX_SOFTWARE.
constexpr int kUserError = 2;
constexpr int kOutOfMemory = 3;
constexpr int kInternalError = 70;

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
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUserError;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const sb::UserError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return kUserError;
  } catch (const sb::OutOfMemory& error) {
    std::fprintf(stderr, "out of memory: %s\n", error.what());
    return kOutOfMemory;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "out of memory: an allocation failed\n");
    return kOutOfMemory;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "internal error (please report it): %s\n", error.what());
    return kInternalError;
  }
}
