#include "cli/data/data_commands.h"

#include <CLI/CLI.hpp>

#include "cli/commands.h"

namespace sb {

void add_data_command(CLI::App& app) {
  CLI::App* data = app.add_subcommand("data", "prepare and inspect training data");
  data->require_subcommand(1);
  add_data_tokenize(*data);
  add_data_stats(*data);
  add_data_check(*data);
  add_data_show(*data);
  add_data_synth(*data);
  add_data_lengths(*data);
  add_data_merge(*data);
  add_data_split(*data);
}

}  // namespace sb
