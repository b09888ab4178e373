#include "report/report_chart.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/report/picture_parts.h"

namespace sb {
namespace {

using Points = std::vector<std::pair<double, double>>;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
// The frame that points are drawn in.
constexpr double kLeft = 64, kRight = 546, kTop = 14, kBottom = 222;

std::string figure_of(const Points& points, bool joined = true, bool diagonal = false) {
  return chart_figure({"title", "unit", "step", {{"line", points, joined}}, diagonal});
}

nlohmann::json data_of(const std::string& figure) {
  return nlohmann::json::parse(parts_of(figure, "<script type=\"application/json\">", "</script>").at(0));
}

// [{x on the page, y on the page}] of every point, from what the script shows.
Points places_of(const std::string& figure) {
  Points places;
  for (const auto& line : data_of(figure))
    for (const auto& point : line["points"]) places.emplace_back(point[0], point[1]);
  return places;
}

TEST(Chart, PlacesAndTicksByArithmetic) {
  // y begins at zero, since its least is less than 0.3 of its greatest, and has 5 % of room above: 0 to 10.5.
  const std::string figure = figure_of({{0, 0}, {5, 10}, {10, 5}});
  EXPECT_EQ(numbers_of(figure, "y2=\"", "\""), (std::vector<double>{222, 182.4, 142.8, 103.1, 63.5, 23.9}));
  EXPECT_EQ(parts_of(figure, "text-anchor=\"end\">", "<"),
            (std::vector<std::string>{"0", "2", "4", "6", "8", "10", "step"}));
  EXPECT_EQ(parts_of(figure, "text-anchor=\"middle\">", "<"),
            (std::vector<std::string>{"0", "2", "4", "6", "8", "10"}));
  EXPECT_EQ(parts_of(figure, "<path d=\"", "\""), std::vector<std::string>{"M64.0 222.0L305.0 23.9L546.0 123.0"});
  EXPECT_EQ(figure.find("<circle"), std::string::npos);
  // Far from zero the axis begins near the least: 0.5 of room on both sides of 100 to 110.
  const std::string far = figure_of({{0, 100}, {10, 110}});
  EXPECT_EQ(parts_of(far, "<path d=\"", "\""), std::vector<std::string>{"M64.0 212.5L546.0 23.5"});
}

// Multiples of 1, 2 or 5 times a power of ten, a few of them, inside the frame, no label twice.
TEST(Chart, TicksOfManyRanges) {
  const std::pair<double, double> ranges[] = {
      {0, 1},         {-1, 1}, {3, 100},     {0.5, 0.50001}, {1e-6, 2e-6},   {-7e14, 7e14},         {-0.3, -0.29},
      {1e6, 1e6 + 3}, {0, 7},  {1, 200'000}, {0, 1e-300},    {5e8, 5e8 + 1}, {1'200'000, 1'200'040}};
  for (const auto& [low, high] : ranges) {
    SCOPED_TRACE(testing::Message() << low << " to " << high);
    const std::string figure = figure_of({{low, low}, {high, high}});
    std::vector<std::string> y = parts_of(figure, "text-anchor=\"end\">", "<");
    y.pop_back();  // the axis's title
    for (const std::vector<std::string>& labels : {parts_of(figure, "text-anchor=\"middle\">", "<"), y}) {
      ASSERT_GE(labels.size(), 3u);
      EXPECT_LE(labels.size(), 8u);
      EXPECT_EQ(std::set<std::string>(labels.begin(), labels.end()).size(), labels.size()) << labels[0];
      const double step = std::stod(labels[1]) - std::stod(labels[0]);
      const double first = step / std::pow(10, std::floor(std::log10(step * 1.0001)));
      EXPECT_TRUE(std::abs(first - 1) < 1e-3 || std::abs(first - 2) < 1e-3 || std::abs(first - 5) < 1e-3) << step;
      for (size_t i = 1; i < labels.size(); ++i)
        EXPECT_NEAR(std::stod(labels[i]) - std::stod(labels[i - 1]), step, 1e-3 * step);
    }
    for (const double at : numbers_of(figure, "y2=\"", "\"")) {
      EXPECT_GE(at, kTop);
      EXPECT_LE(at, kBottom);
    }
  }
}

TEST(Chart, OneValueIsADotInTheMiddle) {
  for (const double value : {0.0, 1.0, -3.0, 1e-300, 1e15, -1e15, 1e300}) {
    for (const bool joined : {true, false}) {
      const std::string figure = figure_of({{value, value}}, joined);
      EXPECT_EQ(numbers_of(figure, "cx=\"", "\""), std::vector<double>{(kLeft + kRight) / 2}) << value;
      EXPECT_EQ(numbers_of(figure, "cy=\"", "\""), std::vector<double>{(kTop + kBottom) / 2}) << value;
      EXPECT_EQ(figure.find("<path"), std::string::npos);
    }
  }
}

TEST(Chart, WhatIsNotFiniteIsLeftOut) {
  for (const double bad : {kNaN, kInfinity, -kInfinity}) {
    const std::string figure = figure_of({{1, bad}, {bad, 2}, {1, 4}, {3, 8}, {bad, bad}});
    EXPECT_EQ(data_of(figure)[0]["points"].size(), 2u);
    EXPECT_EQ(parts_of(figure, "<path d=\"", "\"").size(), 1u);
    for (const char* word : {"nan", "inf", "null"}) EXPECT_EQ(figure.find(word), std::string::npos) << figure;
    EXPECT_EQ(figure_of({{1, bad}, {bad, 2}}), "") << "nothing is left to draw";
  }
  EXPECT_EQ(figure_of({}), "");
  EXPECT_EQ(chart_figure({"t", "u", "x", {}}), "");
}

TEST(Chart, EverythingIsDrawnInsideTheFrame) {
  const Points cases[] = {{{0, 1e308}, {1, -1e308}},
                          {{-1e308, 0}, {1e308, 0}, {0, 5}},
                          {{1, 1e-300}, {2, 2e-300}},
                          {{1e18, 1}, {2e18, 2}},
                          {{1, 1}, {1, 2}, {1, 3}}};
  for (const Points& points : cases) {
    for (const bool diagonal : {false, true}) {
      const std::string figure = figure_of(points, false, diagonal);
      const Points places = places_of(figure);
      EXPECT_EQ(places.size(), points.size());
      for (const auto& [x, y] : places) {
        EXPECT_TRUE(x >= kLeft && x <= kRight && y >= kTop && y <= kBottom) << x << ", " << y;
      }
      EXPECT_EQ(parts_of(figure, "<circle ", ">").size(), points.size());
    }
  }
}

TEST(Chart, TheDiagonalGoesFromCornerToCorner) {
  const std::string figure = figure_of({{1, 3}, {2, 4}, {2.5, 2.5}}, false, true);
  EXPECT_EQ(parts_of(figure, "<line class=\"diagonal\" ", "/>"),
            std::vector<std::string>{"x1=\"64.0\" y1=\"222.0\" x2=\"546.0\" y2=\"14.0\""});
  // Both axes go from 0 to 4.2: a point of two equal numbers lies on it.
  const auto [x, y] = places_of(figure)[2];
  EXPECT_NEAR((x - kLeft) / (kRight - kLeft), (kBottom - y) / (kBottom - kTop), 1e-3);
  EXPECT_EQ(figure_of({{1, 3}, {2, 4}}).find("diagonal"), std::string::npos);
}

// A line keeps its colour whether or not the ones before it have points; the sixth has the first one's.
TEST(Chart, ColoursOfLines) {
  Chart chart{"t", "u", "x", {}};
  for (int i = 0; i < 7; ++i) chart.lines.push_back({"line " + std::to_string(i), {{0, i}, {1, i + 1}}, true});
  const std::vector<std::string> colours = parts_of(chart_figure(chart), "<i style=\"background:", "\"");
  EXPECT_EQ(parts_of(chart_figure(chart), "stroke=\"", "\""), colours) << "the legend tells them apart";
  ASSERT_EQ(colours.size(), 7u);
  EXPECT_EQ(std::set<std::string>(colours.begin(), colours.end()).size(), 5u);
  EXPECT_EQ(colours[5], colours[0]);
  chart.lines[0].points.clear();
  chart.lines[3].points = {{kNaN, 1}};
  EXPECT_EQ(parts_of(chart_figure(chart), "<i style=\"background:", "\""),
            (std::vector<std::string>{colours[1], colours[2], colours[4], colours[5], colours[6]}));
}

TEST(Chart, LongLinesAreThinnedToMeansAndDotsToSomeOfThem) {
  Points points;
  for (int i = 0; i < 6000; ++i) points.emplace_back(i, 3.0 * i + 1);
  const auto line = data_of(figure_of(points))[0]["points"], dots = data_of(figure_of(points, false))[0]["points"];
  ASSERT_EQ(line.size(), 600u);
  ASSERT_EQ(dots.size(), 600u);
  for (int i = 0; i < 600; ++i) {
    EXPECT_NEAR(line[i][2].get<double>(), 10 * i + 4.5, 1e-6);
    EXPECT_NEAR(line[i][3].get<double>(), 3 * (10 * i + 4.5) + 1, 1e-6);
    EXPECT_EQ(dots[i][2].get<double>(), 10 * i);
  }
  points.resize(600);
  EXPECT_EQ(data_of(figure_of(points))[0]["points"][599][2].get<double>(), 599) << "600 are drawn as they are";
  // A number of points that is no multiple: their mean lies in the middle still.
  points.resize(601, {600, 1});
  EXPECT_EQ(data_of(figure_of(points))[0]["points"].size(), 600u);
}

TEST(Chart, HostileWordsStayWords) {
  const std::string attack = "\"><script>alert('1')</script>&\x02";
  const std::string figure = chart_figure({attack, attack, attack, {{attack, {{1, 2}}, true}}});
  EXPECT_EQ(parts_of(figure, "<script", ">").size(), 1u) << "the data's own";
  EXPECT_EQ(figure.find("alert('1')"), figure.find("alert('1')\\u003c")) << "as JSON alone, where no tag can begin";
  // Caption, unit, label for screen readers, the axis and the legend.
  EXPECT_EQ(parts_of(figure, "&quot;&gt;&lt;script&gt;alert(&#39;1", ")").size(), 5u);
  EXPECT_EQ(data_of(figure)[0]["name"], attack) << "the script gets the name itself";
}

}  // namespace
}  // namespace sb
