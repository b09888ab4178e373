#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/data/data_commands.h"
#include "core/errors.h"
#include "data/files/token_file.h"
#include "data/length_statistics.h"
#include "plan/simulate/length_pool.h"

namespace sb {
namespace {

struct StatsArguments {
  std::vector<std::string> paths;
  std::vector<std::string> pools;
  bool json = false;
};

int terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 80) return size.ws_col;
  return 100;
}

void stats(const StatsArguments& arguments) {
  std::vector<int64_t> lengths;
  for (const std::string& path : expand_token_paths(arguments.paths)) {
    const std::unique_ptr<TokenFile> file = open_token_file(path);
    for (int64_t d = 0; d < file->documents(); ++d) lengths.push_back(file->length(d));
  }
  for (const std::string& path : arguments.pools) {
    const std::vector<int64_t> pool = find_lengths(path);
    lengths.insert(lengths.end(), pool.begin(), pool.end());
  }
  SB_USER_CHECK(!lengths.empty(), "data stats: name token files, or a pool of lengths with --lengths");
  const LengthStatistics statistics = measure_lengths(std::move(lengths));
  std::printf("%s%s",
              arguments.json ? length_statistics_json(statistics).c_str()
                             : format_length_statistics(statistics, terminal_width()).c_str(),
              arguments.json ? "\n" : "");
}

}  // namespace

void add_data_stats(CLI::App& data) {
  CLI::App* command =
      data.add_subcommand("stats", "show sequence lengths: histogram, quantiles, share of tokens and of attention");
  auto arguments = std::make_shared<StatsArguments>();
  command->add_option("paths", arguments->paths,
                      "token files: prefixes of .bin and .idx, llm.c .bin files, or directories of MDS shards");
  command->add_option("--lengths", arguments->pools,
                      "pools of lengths: files with one length per line, or named pools (see data lengths --help)");
  command->add_flag("--json", arguments->json, "print the statistics as JSON");
  command->callback([arguments] { stats(*arguments); });
}

}  // namespace sb
