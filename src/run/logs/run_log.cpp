#include "run/logs/run_log.h"

#include <fmt/format.h>

namespace sb {

RunLog::RunLog(Console& console, const std::filesystem::path& directory, int64_t last_step, bool tensorboard)
    : console_(console), metrics_(directory / "metrics.jsonl", last_step) {
  if (tensorboard) tensorboard_ = std::make_unique<TensorBoardWriter>(directory / "tensorboard", last_step + 1);
}

void RunLog::step(const StepReport& report, const std::vector<Metric>& more) {
  console_.step(report);
  std::vector<Metric> metrics = {
      {"step", static_cast<double>(report.step), true},
      {"loss", report.loss},
      {"grad_norm", report.grad_norm},
      {"learning_rate", report.learning_rate},
      {"tokens", static_cast<double>(report.tokens), true},
      {"tokens_per_second", report.tokens_per_second()},
      {"step_ms", 1e3 * report.seconds},
      {"accuracy", report.accuracy},
      {"targets", static_cast<double>(report.targets), true},
      {"gflops_per_second", report.flops / report.seconds / 1e9},
      {"skipped_steps", static_cast<double>(report.skipped_total), true},
  };
  const double executed = report.executed_flops.value_or(report.flops);
  if (report.executed_flops) metrics.push_back({"executed_gflops_per_second", executed / report.seconds / 1e9});
  if (report.peak_flops > 0) {
    metrics.push_back({"mfu", report.flops / report.seconds / report.peak_flops});
    metrics.push_back({"executed_utilization", executed / report.seconds / report.peak_flops});
  }
  if (report.in_order_seconds) {
    metrics.push_back({"compared_in_order_ms", 1e3 * *report.in_order_seconds});
    metrics.push_back({"compared_balanced_ms", 1e3 * *report.balanced_seconds});
  }
  metrics.insert(metrics.end(), more.begin(), more.end());
  write(report.step, "train/", 0, metrics);
}

void RunLog::validation(const ValidationReport& report) {
  console_.validation(report);
  std::vector<Metric> metrics = {{"step", static_cast<double>(report.step), true},
                                 {"validation_loss", report.loss},
                                 {"validation_accuracy", report.accuracy}};
  if (report.recall) metrics.push_back({"validation_recall", *report.recall});
  write(report.step, "validation/", std::string("validation_").size(), metrics);
}

void RunLog::write(int64_t step, const std::string& section, size_t prefix, const std::vector<Metric>& metrics) {
  metrics_.write(metrics);
  if (!tensorboard_) return;
  std::vector<Scalar> scalars;
  for (const Metric& metric : metrics)
    if (metric.name != "step") scalars.push_back({section + metric.name.substr(prefix), metric.value});
  tensorboard_->write(step, scalars);
}

std::vector<Metric> attention_metrics(const AttentionReport& attention, bool every_layer, StepReport& report) {
  std::vector<Metric> metrics;
  const LayerAttention total = attention.total();
  report.density = total.density();
  metrics.push_back({"density", total.density()});
  metrics.push_back({"attention_pairs", static_cast<double>(total.pairs), true});
  if (total.covered_tokens > 0) {
    report.coverage = total.mean_coverage();
    metrics.push_back({"coverage", total.mean_coverage()});
  }
  for (size_t layer = 0; layer < attention.layers.size() && every_layer; ++layer) {
    metrics.push_back({fmt::format("density_layer_{}", layer), attention.layers[layer].density()});
    if (attention.layers[layer].covered_tokens > 0)
      metrics.push_back({fmt::format("coverage_layer_{}", layer), attention.layers[layer].mean_coverage()});
  }
  return metrics;
}

void show_planning(const std::vector<Metric>& planning, StepReport& report) {
  double planned = 0, in_order = 0;
  for (const Metric& metric : planning) {
    if (metric.name == "predicted_makespan_ms") planned = metric.value;
    if (metric.name == "predicted_in_order_ms") in_order = metric.value;
    if (metric.name == "rank_imbalance") report.rank_imbalance = metric.value;
    if (metric.name == "bubble_percent") report.bubble_percent = metric.value;
    if (metric.name == "cluster_step_ms") report.cluster_seconds = metric.value / 1e3;
  }
  if (planned > 0 && in_order > 0) report.gain = in_order / planned;
}

}  // namespace sb
