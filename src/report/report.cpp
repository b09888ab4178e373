#include "report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/markup.h"
#include "core/metric.h"
#include "report/report_chart.h"
#include "report/report_headline.h"
#include "report/report_schedule.h"
#include "report/series.h"
#include "run/logs/console.h"

namespace sb {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --text: #1b1f24; --soft: #6a737d; --line: #d8dde3; --back: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --soft: #9aa4af; --line: #3a414a; --back: #16191d; --card: #1e2329; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1180px; margin: 2em auto; padding: 0 1em; }
p.headline { font-size: 1.2em; } table.facts th { text-align: left; font-weight: 600; padding-right: 18px; vertical-align: top; } table.facts td { text-align: left; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
p.note { color: var(--soft); }
table { border-collapse: collapse; } td { padding: 2px 18px 2px 0; } td + td { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px; position: relative; }
figure.schedule { overflow-x: auto; margin-top: 10px; } figure.schedule svg { min-width: 900px; }
figcaption { font-weight: 600; } .unit { color: var(--soft); font-weight: 400; margin-left: 0.6em; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); stroke-width: 0.6; } .frame { fill: none; stroke: var(--line); } .diagonal { stroke: var(--soft); stroke-dasharray: 4 4; }
.tick { font-size: 11px; fill: var(--soft); }
.legend { font-size: 13px; color: var(--soft); } .legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; } .legend span { margin-right: 10px; }
.tip { position: absolute; top: 8px; right: 10px; font-size: 12px; background: var(--card); color: var(--text); pointer-events: none; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px; overflow-x: auto; }
)";

constexpr const char* kScript = R"(
"use strict";
window.addEventListener("error", e => { document.body.dataset.error = e.message; });
let charts = 0;
for (const figure of document.querySelectorAll("figure.chart")) {
  const lines = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg");
  const tip = document.createElement("div");
  tip.className = "tip";
  figure.append(tip);
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const parts = [];
    for (const line of lines) {
      let near = line.points[0];
      for (const point of line.points) if (Math.abs(point[0] - x) < Math.abs(near[0] - x)) near = point;
      if (parts.length === 0) parts.push(String(Math.round(near[2])));
      parts.push(line.name + " " + near[3].toPrecision(5));
    }
    tip.textContent = parts.join("  ·  ");
  });
  svg.addEventListener("mouseleave", () => { tip.textContent = ""; });
  ++charts;
}
const chooser = document.querySelector("#step");
if (chooser) {
  const show = () => {
    for (const figure of document.querySelectorAll("figure.schedule"))
      figure.hidden = figure.dataset.step !== chooser.value;
  };
  chooser.addEventListener("change", show);
  show();
}
document.body.dataset.charts = charts;
)";

ChartLine line_of(const RunMetrics& metrics, const std::string& series, const std::string& name, bool joined = true) {
  ChartLine line{name, {}, joined};
  if (const Series* values = find_series(metrics, series))
    for (const auto& [step, value] : *values) line.points.emplace_back(static_cast<double>(step), value);
  return line;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Of every micro-batch that was planned and measured, predicted and measured milliseconds.
ChartLine micro_batch_dots(const PlanRecord& plans) {
  ChartLine dots{"micro-batch", {}, false};
  for (const auto& [number, step] : plans.steps) {
    if (!step.measured || step.measured->ranks.size() != step.plan.ranks.size()) continue;
    for (size_t r = 0; r < step.plan.ranks.size(); ++r) {
      const auto& planned = step.plan.ranks[r].micro_batches;
      const auto& measured = step.measured->ranks[r];
      for (size_t i = 0; i < std::min(planned.size(), measured.size()); ++i) {
        double said = 0, took = 0;
        for (const double us : planned[i].forward_us) said += us / 1e3;
        for (const double us : planned[i].backward_us) said += us / 1e3;
        for (const int64_t ns : measured[i].forward) took += static_cast<double>(ns) / 1e6;
        for (const int64_t ns : measured[i].backward) took += static_cast<double>(ns) / 1e6;
        dots.points.emplace_back(said, took);
      }
    }
  }
  // The first steps are cold; of long runs the last ones are shown.
  if (std::ssize(dots.points) > kMostMicroBatchesShown)
    dots.points.erase(dots.points.begin(), dots.points.end() - kMostMicroBatchesShown);
  return dots;
}

std::string summary_table(const ReportInput& input) {
  std::string rows;
  const auto row = [&](const std::string& name, const std::string& value) {
    rows += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", markup_text(name), markup_text(value));
  };
  const RunMetrics& metrics = input.metrics;
  if (const Series* loss = find_series(metrics, "loss")) {
    row("steps", fmt::format("{}", loss->rbegin()->first));
    row("loss, first and last", fmt::format("{:.4f} → {:.4f}", loss->begin()->second, loss->rbegin()->second));
  }
  if (const Series* validation = find_series(metrics, "validation_loss"))
    row("validation loss, last", fmt::format("{:.4f}", validation->rbegin()->second));
  if (const Series* rate = find_series(metrics, "tokens_per_second"))
    row("tokens/s, mean", fmt::format("{:.0f}", mean(*rate)));
  if (const Series* coverage = find_series(metrics, "coverage"))
    row("coverage, mean", fmt::format("{:.4f}", mean(*coverage)));
  if (const Series* budget = find_series(metrics, "budget"))
    row("budget, mean", fmt::format("{:.0f} keys", mean(*budget)));
  double before = 0, after = 0;
  for (const auto& [number, step] : input.plans.steps)
    if (planned_speedup(step)) {
      before += step.plan.baseline_us;
      after += step.plan.makespan_us;
    }
  if (after > 0)
    row("predicted speed-up over running the same batches in order", fmt::format("{:.3f}×", before / after));
  if (const Series* cluster = find_series(metrics, "cluster_step_ms"))
    row("step time of the rehearsed cluster, mean, predicted", fmt::format("{:.1f} ms", mean(*cluster)));
  if (const Series* predicted = find_series(metrics, "predicted_step_ms"))
    if (const Series* measured = find_series(metrics, "step_ms")) {
      std::vector<double> errors;
      for (const auto& [step, value] : *predicted) {
        const auto took = measured->find(step);
        if (took != measured->end() && took->second > 0) errors.push_back(std::abs(value / took->second - 1));
      }
      if (!errors.empty())
        row("prediction error of the step time, median", fmt::format("{:.1f}%", 100 * median(errors)));
    }
  if (const Series* planning = find_series(metrics, "planning_percent"))
    row("planning and tuning, share of the step", fmt::format("{:.2f}%", mean(*planning)));
  return rows.empty() ? std::string("<p>No step of this run has finished yet.</p>\n")
                      : "<table>\n" + rows + "</table>\n";
}

// The loss over the time that a rehearsed cluster would have taken.
ChartLine loss_over_cluster_time(const RunMetrics& metrics) {
  ChartLine line{"training", {}, true};
  const Series* times = find_series(metrics, "cluster_step_ms");
  const Series* losses = find_series(metrics, "loss");
  if (!times || !losses) return line;
  double seconds = 0;
  for (const auto& [step, ms] : *times) {
    seconds += ms / 1e3;
    if (const auto loss = losses->find(step); loss != losses->end()) line.points.emplace_back(seconds, loss->second);
  }
  return line;
}

std::vector<ChartLine> loss_by_source(const RunMetrics& metrics) {
  constexpr size_t kMostLines = 16;  // that a reader can tell apart
  std::vector<ChartLine> lines;
  for (const auto& [name, series] : metrics.series)
    if (name.starts_with(kSourceLoss) && lines.size() < kMostLines)
      lines.push_back(line_of(metrics, name, name.substr(kSourceLoss.size())));
  return lines;
}

std::string charts(const ReportInput& input) {
  const RunMetrics& metrics = input.metrics;
  std::vector<Chart> all;
  all.push_back({"Loss",
                 "nats per token",
                 "step",
                 {line_of(metrics, "loss", "training"), line_of(metrics, "validation_loss", "validation")}});
  all.push_back({"Loss by source", "nats per token", "step", loss_by_source(metrics)});
  all.push_back({"Loss by time on the rehearsed cluster",
                 "nats per token",
                 "seconds, predicted",
                 {loss_over_cluster_time(metrics)}});
  all.push_back({"Step time of the rehearsed cluster",
                 "ms, predicted",
                 "step",
                 {line_of(metrics, "cluster_step_ms", "as planned"),
                  find_series(metrics, "cluster_step_ms") ? line_of(metrics, "predicted_in_order_ms", "in order")
                                                          : ChartLine()}});
  all.push_back({"Throughput", "tokens/s", "step", {line_of(metrics, "tokens_per_second", "tokens/s")}});
  all.push_back({"Coverage",
                 "share of the attention mass",
                 "step",
                 {line_of(metrics, "coverage", "measured"), line_of(metrics, "predicted_coverage", "planned"),
                  line_of(metrics, "base_coverage", "at the base budget, predicted")}});
  all.push_back({"Budget", "keys per query, mean", "step", {line_of(metrics, "budget", "planned")}});
  all.push_back({"Step time",
                 "ms",
                 "step",
                 {line_of(metrics, "step_ms", "measured"), line_of(metrics, "predicted_step_ms", "predicted"),
                  find_series(metrics, "predicted_step_ms")
                      ? line_of(metrics, "predicted_in_order_ms", "in order, predicted schedule")
                      : ChartLine()}});
  all.push_back({"Micro-batches", "ms measured", "ms predicted", {micro_batch_dots(input.plans)}, true});
  all.push_back({"Rank imbalance",
                 "work of the busiest rank / mean",
                 "step",
                 {line_of(metrics, "rank_imbalance", "measured"), line_of(metrics, "worker_imbalance", "predicted")}});
  all.push_back({"Bubbles",
                 "idle, % of rank time",
                 "step",
                 {line_of(metrics, "bubble_percent", "measured, whole step"),
                  line_of(metrics, "predicted_bubble_percent", "predicted schedule")}});
  all.push_back({"Planning and tuning", "% of the step", "step", {line_of(metrics, "planning_percent", "planning")}});
  all.push_back({"Gradient norm", "", "step", {line_of(metrics, "grad_norm", "gradient norm")}});
  std::string out;
  for (const Chart& chart : all) out += chart_figure(chart);
  return "<div class=\"charts\">\n" + out + "</div>\n";
}

std::string schedules(const ReportInput& input) {
  std::string options, figures;
  for (const int64_t number : shown_steps(input.plans, input.step)) {
    const LoggedStep& step = input.plans.steps.at(number);
    const std::string figure = schedule_figure(step);
    if (figure.empty()) continue;
    const auto gain = planned_speedup(step);
    options += fmt::format("<option value=\"{0}\">step {0}{1}</option>\n", number,
                           gain ? fmt::format(", {:.2f}× predicted", *gain) : std::string());
    figures += figure;
  }
  if (figures.empty()) return {};
  return "<h2>Schedule of a step</h2>\n"
         "<p class=\"note\">What each rank computes, before and after balancing, on the same time axis; each "
         "micro-batch has its own color. Transfers, gradient reduction and the optimizer are not shown.</p>\n"
         "<p><select id=\"step\">\n" +
         options + "</select></p>\n" + figures;
}

std::string events_table(const ReportInput& input) {
  if (input.events.empty()) return {};
  std::string rows;
  double lost = 0;
  for (const RunEvent& event : input.events) {
    std::string what = event.reason;
    if (event.event == "resumed")
      what = fmt::format("{} steps and {} lost", event.steps_lost, format_duration(event.seconds_lost));
    lost += event.seconds_lost;
    rows += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                        markup_text(event.time), markup_text(event.event), event.step, markup_text(event.host),
                        event.rank < 0 ? "" : fmt::format("{}", event.rank), markup_text(what));
  }
  return fmt::format(
      "<h2>Events</h2>\n<p class=\"note\">From events.jsonl, in UTC; {} were lost in all.</p>\n<table class=\"events\">"
      "<tr><th>time</th><th>event</th><th>step</th><th>host</th><th>rank</th><th>what</th></tr>\n{}</table>\n",
      format_duration(lost), rows);
}

}  // namespace

std::string write_report(const ReportInput& input) {
  const std::string name = markup_text(input.name);
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "script-src "
      "'unsafe-inline'\">\n<meta name=\"viewport\" content=\"width=device-width\">\n<title>{} · SparseBalance</title>\n"
      "<style>{}</style>\n</head>\n<body>\n<h1>{}</h1>\n",
      name, kStyle, name);
  page += report_headline(input);
  page += "<details><summary>More numbers</summary>\n" + summary_table(input) + "</details>\n";
  if (input.metrics.skipped > 0)
    page += fmt::format("<p class=\"note\">{} of {} lines of metrics.jsonl could not be read and were skipped.</p>\n",
                        input.metrics.skipped, input.metrics.lines);
  if (!input.plans.damage.empty())
    page += fmt::format("<p class=\"note\">{}; nothing after it is shown.</p>\n", markup_text(input.plans.damage));
  page += "<h2>Over time</h2>\n" + charts(input) + schedules(input) + events_table(input);
  if (!input.run_config.empty())
    page += fmt::format("<h2>Configuration</h2>\n<details><summary>run.yaml</summary><pre>{}</pre></details>\n",
                        markup_text(input.run_config));
  return page + fmt::format("<script>{}</script>\n</body>\n</html>\n", kScript);
}

}  // namespace sb
