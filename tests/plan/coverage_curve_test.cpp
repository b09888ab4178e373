#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/random.h"
#include "plan/coverage/cautious_coverage.h"
#include "plan/coverage/coverage.h"
#include "plan/coverage/coverage_statistics.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

constexpr int kLayers = 3;

CoverageTable random_table(Random& random) {
  CoverageTable table;
  table.layers = kLayers;
  for (int64_t length = 1000; length < 100000; length *= 1 + static_cast<int64_t>(1 + random.below(6)))
    table.length_classes.push_back(length);
  for (int64_t budget = 64; budget < 40000; budget *= 1 + static_cast<int64_t>(1 + random.below(4)))
    table.budgets.push_back(budget);
  for (int l = 0; l < kLayers; ++l) {
    auto& classes = table.coverage.emplace_back();
    for (size_t c = 0; c < table.length_classes.size(); ++c) {
      auto& curve = classes.emplace_back();
      double value = 0;
      for (size_t b = 0; b < table.budgets.size(); ++b) curve.push_back(value += (1 - value) * random.uniform());
    }
  }
  return table;
}

// Restated from the format: straight lines over log k between the budgets of the sequence's class, to 1 at its length;
// below the first budget in proportion.
double straight(const CoverageTable& table, int64_t tokens, int layer, int64_t budget) {
  if (budget >= tokens) return 1.0;
  size_t own = 0;
  while (own + 1 < table.length_classes.size() && table.length_classes[own] < tokens) ++own;
  const std::vector<double>& curve = table.coverage[static_cast<size_t>(layer)][own];
  std::vector<std::pair<double, double>> points;
  for (size_t i = 0; i < curve.size() && (i == 0 || table.budgets[i] < tokens); ++i)
    points.emplace_back(std::log(static_cast<double>(table.budgets[i])), curve[i]);
  const double x = std::log(static_cast<double>(budget));
  if (x <= points[0].first) return points[0].second * std::exp(x - points[0].first);
  points.emplace_back(std::log(static_cast<double>(tokens)), 1.0);
  for (size_t i = 1; i < points.size(); ++i)
    if (x <= points[i].first)
      return points[i - 1].second + (points[i].second - points[i - 1].second) * (x - points[i - 1].first) /
                                        (points[i].first - points[i - 1].first);
  return 1.0;
}

TEST(CoverageCurves, TablesAreStraightLinesOverTheLogarithm) {
  Random random(41);
  for (int trial = 0; trial < 40; ++trial) {
    const CoverageTable table = random_table(random);
    const auto model = table_coverage(table, "t");
    for (const int64_t tokens : {1, 63, 64, 65, 999, 1000, 1001, 5000, 70000, 500000})
      for (const int64_t budget : {1, 32, 63, 64, 65, 200, 999, 1000, 4096, 39999, 69999, 499999, 1000000})
        for (int layer = 0; layer < kLayers; ++layer)
          EXPECT_NEAR(model->at({0, tokens}, layer, budget), straight(table, tokens, layer, budget), 1e-12)
              << tokens << " tokens, budget " << budget;
  }
}

// All ways of asking say the same, for every model there is; rising, 1 for what is dense, never above.
TEST(CoverageCurves, ManyAtOnceAreThoseOfOne) {
  Random random(42);
  const auto table = table_coverage(random_table(random), "t");
  const auto power = power_coverage(1.0), layered = layered_coverage(kLayers);
  AttentionSpec spec;
  spec.budget = 2048;
  const CautiousCoverage cautious(*layered, spec), cautious_table(*table, spec);
  const std::vector<int32_t> budgets{1, 64, 640, 2047, 2048, 2049, 10000, 100000, std::numeric_limits<int32_t>::max()};
  std::vector<double> logs;
  for (const int32_t budget : budgets) logs.push_back(std::log(static_cast<double>(budget)));
  for (const CoverageModel* model :
       std::initializer_list<const CoverageModel*>{table.get(), power.get(), layered.get(), &cautious, &cautious_table})
    for (const int64_t tokens : {1, 2, 640, 2048, 2049, 9000, 1000000}) {
      const Sequence sequence{tokens % 7, tokens};
      std::vector<double> all(kLayers * budgets.size()), each(kLayers);
      model->evaluate_layers(sequence, kLayers, budgets, logs, all);
      for (size_t b = 0; b < budgets.size(); ++b) {
        const std::vector<int32_t> same(kLayers, budgets[b]);
        const std::vector<double> same_logs(kLayers, logs[b]);
        model->evaluate_each(sequence, same, same_logs, each);
        for (int layer = 0; layer < kLayers; ++layer) {
          const double one = model->at(sequence, layer, budgets[b]);
          const double here = all[static_cast<size_t>(layer) * budgets.size() + b];
          EXPECT_NEAR(here, one, 1e-12) << model->name() << " " << tokens << " " << budgets[b];
          EXPECT_NEAR(each[static_cast<size_t>(layer)], one, 1e-12) << model->name() << " " << tokens;
          EXPECT_LE(one, 1.0 + 1e-12);
          if (budgets[b] >= tokens) {
            EXPECT_NEAR(one, 1.0, 1e-12) << model->name();
          }
          if (b > 0) {
            EXPECT_GE(here, all[static_cast<size_t>(layer) * budgets.size() + b - 1] - 1e-12) << model->name();
          }
        }
      }
    }
}

TEST(CoverageCurves, CautionIsSymmetricAroundTheBase) {
  AttentionSpec spec;
  spec.budget = 4096;
  const auto inner = power_coverage(0.5);
  const CautiousCoverage cautious(*inner, spec);
  const Sequence sequence{0, 65536};
  const double base = 0.25;  // √(4096 / 65536)
  EXPECT_NEAR(cautious.at(sequence, 0, 4096), base, 1e-12);
  EXPECT_NEAR(cautious.at(sequence, 0, 1024), base - 1.15 * 0.125, 1e-12);
  EXPECT_NEAR(cautious.at(sequence, 0, 16384), base + 0.85 * 0.25, 1e-12);
  EXPECT_EQ(cautious.at(sequence, 0, 65536), 1.0);
  // What is dense whatever is tuned has nothing to be cautious about.
  EXPECT_EQ(cautious.at({0, 4096}, 0, 1024), inner->at({0, 4096}, 0, 1024));
  EXPECT_EQ(cautious.name(), inner->name());
  EXPECT_TRUE(cautious.uniform_layers());
}

TEST(CoverageCurves, HostileFilesAreNamed) {
  using Json = nlohmann::ordered_json;
  CoverageTable table;
  table.layers = 2;
  table.length_classes = {1000, 2000};
  table.budgets = {100, 200};
  table.coverage.assign(2, {{0.1, 0.2}, {0.3, 1.0}});
  const Json whole = Json::parse(write_coverage(table));
  const struct {
    const char *path, *value, *said;
  } cases[] = {
      {"/version", "\"1\"", "`version` must be 1"},
      {"/layers", "0", "`layers` must be an integer from 1"},
      {"/layers", "-2", "`layers` must be an integer from 1"},
      {"/layers", "2.0", "`layers` must be an integer from 1"},
      {"/layers", "4294967298", "`layers` must be an integer from 1"},
      {"/layers", "18446744073709551615", "`layers` must be an integer from 1"},
      {"/length_classes", "[]", "`length_classes` must be a list of integers"},
      {"/length_classes", "{}", "`length_classes` must be a list of integers"},
      {"/length_classes", "[2000, 1000]", "`length_classes` must hold positive integers in ascending order"},
      {"/budgets", "[0, 1]", "`budgets` must hold positive integers in ascending order"},
      {"/budgets", "[100, 100]", "`budgets` must hold positive integers in ascending order"},
      {"/budgets", "[100, 200.5]", "`budgets` must hold positive integers in ascending order"},
      {"/budgets", "[100, 18446744073709551615]", "`budgets` must hold positive integers in ascending order"},
      {"/coverage", "7", "`coverage` must hold one list per layer (2)"},
      {"/coverage/1", "[[0.1, 0.2]]", "`coverage` of layer 1 must hold one list per length class (2)"},
      {"/coverage/0/1", "[0.1]", "`coverage` of layer 0, class 1 must hold one value per budget (2)"},
      {"/coverage/0/1", "null", "`coverage` of layer 0, class 1 must hold one value per budget (2)"},
      {"/coverage/1/0", "[-0.1, 0.2]", "`coverage` of layer 1, class 0 must rise from 0 to at most 1"},
      {"/coverage/1/0", "[0.1, 1.000001]", "`coverage` of layer 1, class 0 must rise from 0 to at most 1"},
      {"/coverage/1/1", "[\"0.1\", 1]", "`coverage` of layer 1, class 1 must rise from 0 to at most 1"},
  };
  EXPECT_EQ(write_coverage(parse_coverage(whole.dump(), "c.json")), write_coverage(table));
  for (const auto& [path, value, said] : cases) {
    Json changed = whole;
    changed[Json::json_pointer(path)] = Json::parse(value);
    const std::string message = message_of([&] { parse_coverage(changed.dump(), "c.json"); });
    EXPECT_EQ(message.rfind("c.json: ", 0), 0u) << message;
    EXPECT_NE(message.find(said), std::string::npos) << path << " = " << value << ": " << message;
  }
  for (const char* key : {"format", "version", "layers", "length_classes", "budgets", "coverage"}) {
    Json changed = whole;
    changed.erase(key);
    EXPECT_NE(message_of([&] { parse_coverage(changed.dump(), "c.json"); }).find(key), std::string::npos) << key;
  }
  // Flat curves and the whole from the start are curves.
  Json flat = whole;
  flat["coverage"] = Json::parse("[[[0, 0], [1, 1]], [[0.5, 0.5], [0.5, 1.0]]]");
  EXPECT_NO_THROW(parse_coverage(flat.dump(), "c.json"));
}

TEST(CoverageCurves, NamesThatAreNone) {
  for (const auto& [name, said] : {std::pair{"power:", "`` is not a number"},
                                   {"power:0.2x", "`0.2x` is not a number"},
                                   {"power:nan", "exponent in (0, 1]"},
                                   {"power:inf", "exponent in (0, 1]"},
                                   {"power:0", "exponent in (0, 1]"},
                                   {"power:1.0001", "exponent in (0, 1]"},
                                   {"power:1e-999", "is not a number"},
                                   {"layered ", "expected power:GAMMA, layered or a readable"}})
    EXPECT_NE(message_of([name = name] { find_coverage(name, 2); }).find(said), std::string::npos) << name;
  EXPECT_NEAR(find_coverage("power:1", 2)->at({0, 1000}, 0, 250), 0.25, 1e-12);
}

}  // namespace
}  // namespace sb
