#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "run/config/run_config.h"

namespace CLI {
class App;
}

namespace sb {

// What every sub-command that takes a run.yaml has on its command line.
struct RunArguments {
  std::filesystem::path file;
  std::vector<std::string> overrides;
  bool print_config = false;

  RunConfig load() const { return load_run_config(file, overrides); }
};

// The file (required), --set and --print-config. The arguments must outlive the parsing.
void add_run_arguments(CLI::App& command, RunArguments& arguments);
// The file (not required) and --set alone.
void add_run_file(CLI::App& command, RunArguments& arguments);

}  // namespace sb
