#include "eval/needle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/errors.h"
#include "core/markup.h"

namespace sb {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

int64_t matches(std::string_view prediction, const std::vector<std::string>& outputs) {
  const std::string text = lower(prediction);
  return std::count_if(outputs.begin(), outputs.end(),
                       [&](const std::string& output) { return text.find(lower(output)) != std::string::npos; });
}

std::string length_label(int64_t tokens) {
  return tokens % 1024 == 0 ? fmt::format("{}K", tokens / 1024) : fmt::format("{}", tokens);
}

}  // namespace

double ruler_match_all(std::string_view prediction, const std::vector<std::string>& outputs) {
  SB_CHECK(!outputs.empty(), "no expected output");
  return static_cast<double>(matches(prediction, outputs)) / static_cast<double>(outputs.size());
}

double ruler_match_part(std::string_view prediction, const std::vector<std::string>& outputs) {
  return matches(prediction, outputs) > 0 ? 1.0 : 0.0;
}

double NeedleGrid::mean() const {
  double sum = 0;
  int64_t count = 0;
  for (const std::vector<double>& row : values) {
    for (const double value : row) {
      sum += value;
      ++count;
    }
  }
  return count == 0 ? 0.0 : sum / static_cast<double>(count);
}

std::string needle_table(const NeedleGrid& grid) {
  std::string text = fmt::format("{:>8}", "depth");
  for (const int64_t length : grid.lengths) text += fmt::format("{:>9}", length_label(length));
  text += '\n';
  for (size_t row = 0; row < grid.depths.size(); ++row) {
    text += fmt::format("{:>7.0f}%", 100 * grid.depths[row]);
    for (const double value : grid.values[row]) text += fmt::format("{:>8.1f}%", 100 * value);
    text += '\n';
  }
  return text + fmt::format("{:>8}{:>8.1f}%\n", "mean", 100 * grid.mean());
}

std::string needle_svg(const NeedleGrid& grid, const std::string& title) {
  constexpr int kCellWidth = 64, kCellHeight = 32, kLeft = 70, kTop = 60;
  const std::string caption = "needles found, in percent, by context length (across) and depth of the needle (down)";
  // Wide enough for its words, whose letters take up to 8 units of the larger and 7 of the smaller size.
  const int words = std::max(8 * static_cast<int>(title.size()), 7 * static_cast<int>(caption.size()));
  const int width = kLeft + std::max(kCellWidth * static_cast<int>(grid.lengths.size()), words) + 20;
  const int height = kTop + kCellHeight * static_cast<int>(grid.depths.size()) + 40;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
      "<text x=\"{2}\" y=\"20\" font-size=\"14\">{3}</text>\n",
      width, height, kLeft, markup_text(title));
  for (size_t column = 0; column < grid.lengths.size(); ++column) {
    svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                       kLeft + kCellWidth * static_cast<int>(column) + kCellWidth / 2, kTop - 8,
                       length_label(grid.lengths[column]));
  }
  for (size_t row = 0; row < grid.depths.size(); ++row) {
    const int y = kTop + kCellHeight * static_cast<int>(row);
    svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{:.0f}%</text>\n", kLeft - 8,
                       y + kCellHeight / 2 + 4, 100 * grid.depths[row]);
    for (size_t column = 0; column < grid.lengths.size(); ++column) {
      const double value = std::clamp(grid.values[row][column], 0.0, 1.0);
      // Red over yellow to green: hue 0 … 120.
      svg += fmt::format(
          "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"hsl({:.0f},70%,60%)\"/>"
          "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n",
          kLeft + kCellWidth * static_cast<int>(column), y, kCellWidth - 2, kCellHeight - 2, 120 * value,
          kLeft + kCellWidth * static_cast<int>(column) + kCellWidth / 2, y + kCellHeight / 2 + 4, 100 * value);
    }
  }
  svg += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n", kLeft, height - 14, caption);
  return svg + "</svg>\n";
}

}  // namespace sb
