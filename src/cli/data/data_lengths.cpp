#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/data/data_commands.h"
#include "cli/output_file.h"
#include "core/errors.h"
#include "core/random.h"
#include "data/files/token_file.h"
#include "data/length_statistics.h"
#include "plan/simulate/length_pool.h"

namespace sb {
namespace {

struct LengthsArguments {
  std::string pool, output;
  std::vector<std::string> paths;
  int64_t count = 0;
  uint64_t seed = 1;
};

void write_lengths(const LengthsArguments& arguments) {
  SB_USER_CHECK(arguments.pool.empty() != arguments.paths.empty(),
                "data lengths: pass either --pool ({}) or --input with token files",
                fmt::join(named_length_pools(), ", "));
  check_output(arguments.output);
  std::vector<int64_t> lengths;
  if (!arguments.pool.empty()) lengths = find_lengths(arguments.pool);
  for (const std::string& path : expand_token_paths(arguments.paths)) {
    const std::unique_ptr<TokenFile> file = open_token_file(path);
    for (int64_t d = 0; d < file->documents(); ++d)
      if (file->length(d) > 0) lengths.push_back(file->length(d));
  }
  SB_USER_CHECK(!lengths.empty(), "data lengths: every document of the input is empty");
  std::string comment = arguments.pool.empty() ? fmt::format("{}", fmt::join(arguments.paths, " ")) : arguments.pool;
  if (arguments.count > 0) {
    Random random(arguments.seed);
    std::vector<int64_t> drawn(static_cast<size_t>(arguments.count));
    for (int64_t& length : drawn) length = lengths[random.below(lengths.size())];
    lengths = std::move(drawn);
    comment += fmt::format(", {} drawn with seed {}", arguments.count, arguments.seed);
  }
  std::string text = fmt::format("# {}\n", comment);
  for (int64_t length : lengths) text += fmt::format("{}\n", length);
  write_output(arguments.output, text);
  std::printf("%s: %zu lengths\n%s", arguments.output.c_str(), lengths.size(),
              format_length_statistics(measure_lengths(lengths)).c_str());
}

}  // namespace

void add_data_lengths(CLI::App& data) {
  CLI::App* command = data.add_subcommand(
      "lengths", "write a pool of sequence lengths, one per line, to simulate or generate data with");
  auto arguments = std::make_shared<LengthsArguments>();
  command->add_option(
      "--pool", arguments->pool,
      fmt::format("named pool ({}) or file with one length per line", fmt::join(named_length_pools(), ", ")));
  command->add_option("paths,--input", arguments->paths, "token files to take the document lengths from");
  command->add_option("--count", arguments->count, "draw this many lengths at random (default: all of them, in order)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 32));
  command->add_option("--seed", arguments->seed, "random seed of the draw")->capture_default_str();
  command->add_option("--output", arguments->output, "file to write")->required();
  command->callback([arguments] { write_lengths(*arguments); });
}

}  // namespace sb
