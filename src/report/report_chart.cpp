#include "report/report_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/markup.h"

namespace sb {
namespace {

constexpr double kWidth = 560, kHeight = 260, kLeft = 64, kRight = 14, kTop = 14, kBottom = 38;
constexpr size_t kMostPoints = 600;
constexpr const char* kColours[] = {"#1f77b4", "#e6550d", "#31a354", "#756bb1", "#8c564b"};
constexpr double kLargest = 1e15;  // what lies beyond is drawn at the edge

struct Range {
  double low = 0, high = 1;
};

void widen(Range& range, double value, bool& any) {
  range.low = any ? std::min(range.low, value) : value;
  range.high = any ? std::max(range.high, value) : value;
  any = true;
}

// Some room around, and never empty.
Range padded(Range range) {
  const double span = range.high - range.low;
  const double room = span > 0 ? 0.05 * span : std::max(1e-9, 0.05 * std::abs(range.high));
  const bool from_zero = range.low >= 0 && range.low < 0.3 * range.high;
  return {from_zero ? 0.0 : range.low - room, range.high + room};
}

std::vector<double> ticks(const Range& range) {
  const double rough = (range.high - range.low) / 5;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double part = rough / power;
  const double step = power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
  std::vector<double> out;
  if (!(step > 0) || !std::isfinite(step)) return out;
  for (double at = std::ceil(range.low / step) * step; at <= range.high && out.size() < 12; at += step)
    out.push_back(std::abs(at) < 1e-9 * step ? 0.0 : at);
  return out;
}

std::vector<std::pair<double, double>> thinned(const ChartLine& line) {
  std::vector<std::pair<double, double>> points;
  for (const auto& [x, y] : line.points)
    if (std::isfinite(x) && std::isfinite(y))
      points.emplace_back(std::clamp(x, -kLargest, kLargest), std::clamp(y, -kLargest, kLargest));
  if (points.size() <= kMostPoints) return points;
  std::vector<std::pair<double, double>> out;
  const size_t n = points.size();
  for (size_t bin = 0; bin < kMostPoints; ++bin) {
    const size_t begin = bin * n / kMostPoints, end = (bin + 1) * n / kMostPoints;
    if (!line.joined) {
      out.push_back(points[begin]);  // a mean of dots would be a place where none was
      continue;
    }
    double x = 0, y = 0;
    for (size_t i = begin; i < end; ++i) {
      x += points[i].first / static_cast<double>(end - begin);
      y += points[i].second / static_cast<double>(end - begin);
    }
    out.emplace_back(x, y);
  }
  return out;
}

}  // namespace

std::string chart_figure(const Chart& chart) {
  std::vector<std::vector<std::pair<double, double>>> lines;
  Range xs, ys;
  bool any_x = false, any_y = false;
  for (const ChartLine& line : chart.lines) {
    lines.push_back(thinned(line));
    for (const auto& [x, y] : lines.back()) {
      widen(xs, x, any_x);
      widen(ys, y, any_y);
    }
  }
  if (!any_x) return {};
  if (chart.diagonal) xs = ys = {std::min(xs.low, ys.low), std::max(xs.high, ys.high)};
  ys = padded(ys);
  if (chart.diagonal || xs.low == xs.high) xs = padded(xs);
  const double width = kWidth - kLeft - kRight, height = kHeight - kTop - kBottom;
  const auto px = [&](double x) { return kLeft + width * ((x - xs.low) / (xs.high - xs.low)); };
  const auto py = [&](double y) { return kTop + height * (1 - (y - ys.low) / (ys.high - ys.low)); };

  std::string out = fmt::format("<figure class=\"chart\"><figcaption>{}<span class=\"unit\">{}</span></figcaption>\n",
                                markup_text(chart.title), markup_text(chart.unit));
  out += fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, kHeight,
                     markup_text(chart.title));
  for (const double tick : ticks(ys))
    out += fmt::format(
        "<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text class=\"tick\" x=\"{3}\" "
        "y=\"{4:.1f}\" text-anchor=\"end\">{5:.10g}</text>\n",
        kLeft, kWidth - kRight, py(tick), kLeft - 6, py(tick) + 4, tick);
  for (const double tick : ticks(xs))
    out += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.10g}</text>\n", px(tick),
                       kHeight - kBottom + 16, tick);
  out += fmt::format("<text class=\"tick\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kWidth - kRight,
                     kHeight - 6, markup_text(chart.x_title));
  out +=
      fmt::format("<rect class=\"frame\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>\n", kLeft, kTop, width, height);
  if (chart.diagonal)
    out += fmt::format("<line class=\"diagonal\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
                       px(std::max(xs.low, ys.low)), py(std::max(xs.low, ys.low)), px(std::min(xs.high, ys.high)),
                       py(std::min(xs.high, ys.high)));
  nlohmann::ordered_json data = nlohmann::ordered_json::array();
  std::string legend;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].empty()) continue;
    const char* colour = kColours[i % std::size(kColours)];
    const std::string& name = chart.lines[i].name;
    legend += fmt::format("<span><i style=\"background:{}\"></i>{}</span> ", colour, markup_text(name));
    nlohmann::ordered_json points = nlohmann::ordered_json::array();
    std::string path;
    const bool joined = chart.lines[i].joined && lines[i].size() > 1;
    for (const auto& [x, y] : lines[i]) {
      if (joined)
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px(x), py(y));
      else
        out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\" fill=\"{}\"/>\n", px(x), py(y), colour);
      points.push_back({std::round(px(x) * 10) / 10, std::round(py(y) * 10) / 10, x, y});
    }
    if (joined) out += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\"/>\n", path, colour);
    data.push_back({{"name", name}, {"points", std::move(points)}});
  }
  // For the script that shows values under the pointer. Invalid UTF-8 is replaced; no `<` may end the element early.
  std::string json = data.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
  for (size_t at = 0; (at = json.find('<', at)) != std::string::npos;) json.replace(at, 1, "\\u003c");
  return out + fmt::format(
                   "</svg>\n<div class=\"legend\">{}</div>\n<script type=\"application/json\">{}</script>\n</figure>\n",
                   legend, json);
}

}  // namespace sb
