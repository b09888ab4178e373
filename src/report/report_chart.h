#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sb {

struct ChartLine {
  std::string name;
  std::vector<std::pair<double, double>> points;  // finite; ascending x where they are joined
  bool joined = true;                             // false: dots
};

struct Chart {
  std::string title, unit;  // of y
  std::string x_title = "step";
  std::vector<ChartLine> lines;
  bool diagonal = false;  // draws y = x, for predicted against measured; both axes then span the same
};

// A figure with an SVG; empty when there are no points. Long lines are thinned to means of neighbours.
std::string chart_figure(const Chart& chart);

}  // namespace sb
