#include "tests/train/rank_runs.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <sstream>

#include "comm/thread_communicator.h"
#include "tests/run/scratch_directory.h"

namespace sb {

std::vector<std::string> RankGrid::overrides() const {
  return {fmt::format("parallel.dp={}", dp), fmt::format("parallel.pp={}", pp), fmt::format("parallel.cp={}", cp),
          fmt::format("parallel.node_size={}", node_size), fmt::format("parallel.tp={}", tp)};
}

std::string RankGrid::name() const {
  return fmt::format("dp{}-pp{}-cp{}-nodes{}-tp{}", dp, pp, cp, node_size, tp);
}

TrainSummary train_on_ranks(const RunConfig& config, const std::function<bool(int rank)>& stop) {
  TrainSummary summary;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen("/dev/null", "w"), std::fclose);
  run_thread_ranks(config.parallel.grid().ranks(), [&](Communicator& world) {
    const TrainSummary own =
        run_training(config, out.get(), false, [&] { return stop(world.rank()); }, {&world, world.size()});
    if (world.rank() == 0) summary = own;
  });
  return summary;
}

std::vector<nlohmann::json> metrics_of(const std::filesystem::path& run) {
  std::istringstream in(read_bytes(run / "metrics.jsonl"));
  std::vector<nlohmann::json> lines;
  std::string line;
  while (std::getline(in, line)) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

void expect_same_record(const std::filesystem::path& got, const std::filesystem::path& expected,
                        const RecordKeys& keys) {
  const auto a = metrics_of(got), b = metrics_of(expected);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    for (const char* key : keys.equal) EXPECT_EQ(a[i].value(key, -1), b[i].value(key, -1)) << key << " of line " << i;
    for (const char* key : keys.close) {
      ASSERT_EQ(a[i].contains(key), b[i].contains(key)) << key;
      if (!b[i].contains(key)) continue;
      const double value = b[i][key].get<double>();
      EXPECT_NEAR(a[i][key].get<double>(), value, keys.tolerance * std::max(std::abs(value), 1e-3))
          << key << " of line " << i;
    }
  }
}

}  // namespace sb
