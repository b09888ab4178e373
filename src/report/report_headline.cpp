#include "report/report_headline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "core/errors.h"
#include "core/markup.h"
#include "report/report_schedule.h"
#include "report/series.h"
#include "run/config/run_config.h"

namespace sb {
namespace {

// What of the configuration can be read; a report is made of damaged runs, too.
std::optional<RunConfig> configuration(const ReportInput& input) {
  if (input.run_config.empty()) return std::nullopt;
  try {
    return parse_run_config(input.run_config, "run.yaml");
  } catch (const UserError&) {
    return std::nullopt;
  }
}

const char* family_name(ModelConfig::Family family) {
  return family == ModelConfig::Family::qwen2 ? "Qwen2" : family == ModelConfig::Family::qwen3 ? "Qwen3" : "Llama";
}

std::string model_text(const RunConfig& config) {
  if (!config.model.init) return config.model.path.string();
  const ModelConfig& model = *config.model.init;
  return fmt::format("{} from scratch: {} layers, hidden size {}, {} heads, vocabulary of {}",
                     family_name(model.family), model.layers, model.hidden_size, model.heads, model.vocab_size);
}

std::string data_text(const RunConfig& config) {
  if (config.data.synthetic)
    return fmt::format("the task {}, sequences of up to {} tokens", synthetic_task_name(config.data.synthetic->task),
                       config.data.max_sequence_length);
  std::vector<std::string> paths;
  for (const WeightedPath& path : config.data.train) paths.push_back(path.path.string());
  return fmt::format("{}, sequences of up to {} tokens", fmt::join(paths, ", "), config.data.max_sequence_length);
}

std::string machine_text(const ReportInput& input, const RunConfig& config) {
  const ParallelOptions& parallel = config.parallel;
  const int ranks = parallel.grid().ranks();
  std::string text = input.machine.empty() ? config.device == DeviceKind::cuda ? "GPU" : "CPU" : input.machine;
  if (ranks > 1)
    text = fmt::format("{} ranks (data {} × pipeline {} × context {} × tensor {}) on {}", ranks, parallel.dp,
                       parallel.pp, parallel.cp, parallel.tp, text);
  if (const RehearsedGrid& cluster = parallel.rehearse; cluster.on())
    text +=
        fmt::format(", rehearsing {} ranks (data {} × pipeline {})", cluster.dp * cluster.pp, cluster.dp, cluster.pp);
  return text;
}

// "Balancing made steps 1.21× as fast …", as measured and as predicted; empty: nothing was balanced.
std::string gain_text(const ReportInput& input) {
  double before = 0, after = 0;
  for (const auto& [number, step] : input.plans.steps)
    if (planned_speedup(step)) {
      before += step.plan.baseline_us;
      after += step.plan.makespan_us;
    }
  const std::string predicted = after > 0 ? fmt::format("{:.2f}×", before / after) : "";
  const Series* in_order = find_series(input.metrics, "compared_in_order_ms");
  const Series* balanced = find_series(input.metrics, "compared_balanced_ms");
  if (in_order && balanced && sum(*balanced) > 0)
    return fmt::format(
        "Balancing made steps <b>{:.2f}× as fast</b> as the same batches in order: measured by running both on {} "
        "steps (forward, backward and gradient reduction){}.",
        sum(*in_order) / sum(*balanced), in_order->size(),
        predicted.empty() ? "" : "; predicted for all steps: " + predicted);
  if (predicted.empty()) return {};
  if (find_series(input.metrics, "cluster_step_ms"))
    return "On the rehearsed cluster, balancing makes the schedules of the steps <b>" + predicted +
           " as fast</b> as the same batches in order (predicted).";
  return "Balancing made the schedules of the steps <b>" + predicted +
         " as fast</b> as the same batches in order (predicted; balance.compare_steps measures it).";
}

std::string time_text(const RunMetrics& metrics) {
  const Series* steps = find_series(metrics, "step_ms");
  if (!steps) return {};
  std::string text = fmt::format("{:.1f} s in {} steps", sum(*steps) / 1e3, steps->size());
  const Series* bubbles = find_series(metrics, "bubble_percent");
  if (!bubbles) return text + ".";
  // Everything in which a rank computed nothing: waiting for others, the reduction, the optimizer.
  text +=
      fmt::format(": ranks computed {:.0f}% of the time and were idle {:.0f}%", 100 - mean(*bubbles), mean(*bubbles));
  if (const Series* schedule = find_series(metrics, "predicted_bubble_percent"))
    text += fmt::format(" ({:.0f}% in the predicted schedule alone)", mean(*schedule));
  if (const Series* waited = find_series(metrics, "planning_wait_ms"); waited && sum(*steps) > 0)
    text += fmt::format("; waiting for plans took {:.1f}%", 100 * sum(*waited) / sum(*steps));
  return text + ".";
}

}  // namespace

std::string report_headline(const ReportInput& input) {
  const RunMetrics& metrics = input.metrics;
  std::string text;
  if (const Series* loss = find_series(metrics, "loss"))
    text += fmt::format("<p class=\"headline\">{} steps, loss {:.3f} → {:.3f}. {}</p>\n", loss->rbegin()->first,
                        loss->begin()->second, loss->rbegin()->second, gain_text(input));
  std::string rows;
  const auto row = [&](const char* name, const std::string& value) {
    if (!value.empty()) rows += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", name, markup_text(value));
  };
  if (const std::optional<RunConfig> config = configuration(input)) {
    row("model", model_text(*config));
    row("data", data_text(*config));
    row("machine", machine_text(input, *config));
  }
  row("time", time_text(metrics));
  return rows.empty() ? text : text + "<table class=\"facts\">\n" + rows + "</table>\n";
}

}  // namespace sb
