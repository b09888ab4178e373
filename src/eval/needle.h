#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sb {

// RULER's published scores. all: share of the expected strings that the prediction contains, ignoring case. part:
// whether it contains any (the question-answering tasks).
double ruler_match_all(std::string_view prediction, const std::vector<std::string>& outputs);
double ruler_match_part(std::string_view prediction, const std::vector<std::string>& outputs);

// Scores (0 … 1) of a grid: rows are depths, columns lengths; values[depth][length].
struct NeedleGrid {
  std::vector<double> depths;
  std::vector<int64_t> lengths;
  std::vector<std::vector<double>> values;
  double mean() const;
};

std::string needle_table(const NeedleGrid& grid);
// A heat map that needs nothing but a browser: rectangles and text.
std::string needle_svg(const NeedleGrid& grid, const std::string& title);

}  // namespace sb
