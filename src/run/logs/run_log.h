#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "run/logs/console.h"
#include "run/logs/metrics_log.h"
#include "run/logs/tensorboard_writer.h"

namespace sb {

// Where a run's numbers go: the console, metrics.jsonl and TensorBoard. Rank 0 has one.
class RunLog {
 public:
  // `last_step`: the one the run goes on from; what was logged after it goes.
  RunLog(Console& console, const std::filesystem::path& directory, int64_t last_step, bool tensorboard);

  // `more` follows what the report says.
  void step(const StepReport& report, const std::vector<Metric>& more);
  void validation(const ValidationReport& report);
  // The last step that an earlier process of the run validated; -1: none.
  int64_t last_validation() const { return metrics_.last_validation(); }

 private:
  void write(int64_t step, const std::string& section, size_t prefix, const std::vector<Metric>& metrics);

  Console& console_;
  MetricsLog metrics_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
};

// Density and coverage of a step; into the report too.
std::vector<Metric> attention_metrics(const AttentionReport& attention, bool every_layer, StepReport& report);

// What of a planner's metrics the progress line shows, into the report.
void show_planning(const std::vector<Metric>& planning, StepReport& report);

}  // namespace sb
