#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/config/run_config.h"
#include "train/training_run.h"

namespace sb {

struct RankGrid {
  int dp = 1, pp = 1, cp = 1, node_size = 0, tp = 1;
  std::vector<std::string> overrides() const;
  std::string name() const;  // for directories and traces
};

// Trains on as many ranks as the configuration says, threads of this process; the summary of rank 0.
TrainSummary train_on_ranks(
    const RunConfig& config, const std::function<bool(int rank)>& stop = [](int) { return false; });

// The lines of a run's metrics.jsonl.
std::vector<nlohmann::json> metrics_of(const std::filesystem::path& run);

// The same lines, but for what depends on the clock or on the ranks: some keys equal, some close.
struct RecordKeys {
  std::vector<const char*> equal, close;
  double tolerance = 1e-5;
};
void expect_same_record(const std::filesystem::path& got, const std::filesystem::path& expected,
                        const RecordKeys& keys);

}  // namespace sb
