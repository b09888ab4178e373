#include "plan/coverage/coverage.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "core/errors.h"
#include "plan/simulate/length_pool.h"
#include "tests/core/message_of.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

TEST(Coverage, PowerFamily) {
  const auto power = find_coverage("power:0.22", 36);
  EXPECT_TRUE(power->uniform_layers());
  EXPECT_NEAR(power->at({0, 32768}, 5, 8192), std::pow(0.25, 0.22), 1e-12);
  EXPECT_DOUBLE_EQ(power->at({0, 8192}, 0, 8192), 1.0);
  EXPECT_DOUBLE_EQ(power->at({0, 100}, 0, 8192), 1.0);
}

TEST(Coverage, LayeredFamily) {
  const auto layered = find_coverage("layered", 36);
  EXPECT_FALSE(layered->uniform_layers());
  double least = 2, most = 0;
  for (int64_t id = 0; id < 2000; ++id) {
    const double first = std::log(layered->at({id, 65536}, 0, 8192)) / std::log(1.0 / 8);
    const double last = std::log(layered->at({id, 65536}, 35, 8192)) / std::log(1.0 / 8);
    EXPECT_NEAR(last / first, 4.0, 1e-9);
    least = std::min(least, first);
    most = std::max(most, first);
  }
  EXPECT_NEAR(least, 0.07, 0.001);
  EXPECT_NEAR(most, 0.13, 0.001);
}

CoverageTable small_table() {
  CoverageTable table;
  table.layers = 2;
  table.length_classes = {16384, 65536};
  table.budgets = {1024, 4096, 16384};
  table.coverage = {{{0.5, 0.8, 1.0}, {0.3, 0.6, 0.9}}, {{0.6, 0.9, 1.0}, {0.4, 0.7, 0.95}}};
  return table;
}

TEST(Coverage, TableInterpolates) {
  const auto table = table_coverage(small_table(), "t");
  EXPECT_DOUBLE_EQ(table->at({0, 10000}, 0, 1024), 0.5);
  EXPECT_NEAR(table->at({0, 40000}, 0, 2048), 0.45, 1e-12);
  EXPECT_NEAR(table->at({0, 40000}, 1, 4096), 0.7, 1e-12);
  EXPECT_DOUBLE_EQ(table->at({0, 10000}, 0, 10000), 1.0);
  // Longer than every class: the last one. Rising in the budget throughout.
  double last = 0;
  for (int64_t k = 128; k <= 100000; k += 128) {
    const double value = table->at({0, 100000}, 0, k);
    EXPECT_GE(value, last);
    EXPECT_LE(value, 1.0);
    last = value;
  }
}

TEST(Coverage, FilesAndComplaints) {
  const std::string text = R"({"format": "sparsebalance-coverage", "version": 1, "layers": 2,
    "length_classes": [16384, 65536], "budgets": [1024, 4096, 16384],
    "coverage": [[[0.5, 0.8, 1.0], [0.3, 0.6, 0.9]], [[0.6, 0.9, 1.0], [0.4, 0.7, 0.95]]]})";
  const CoverageTable table = parse_coverage(text, "c.json");
  EXPECT_EQ(table.layers, 2);
  EXPECT_EQ(table.length_classes, small_table().length_classes);
  EXPECT_EQ(table.budgets, small_table().budgets);
  EXPECT_EQ(table.coverage, small_table().coverage);
  EXPECT_TRUE(table.assumed_layers.empty());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const size_t at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    changed.replace(at, from.size(), to);
    return message_of([&] { parse_coverage(changed, "c.json"); });
  };
  EXPECT_NE(with("sparsebalance-coverage", "x").find("c.json"), std::string::npos);
  EXPECT_NE(with("\"version\": 1", "\"version\": 2").find("version"), std::string::npos);
  EXPECT_NE(with("0.8", "0.4").find("must rise"), std::string::npos);
  EXPECT_NE(with("4096", "512").find("ascending"), std::string::npos);
  EXPECT_NE(with("\"layers\": 2", "\"layers\": 3").find("one list per layer"), std::string::npos);
  const std::string guessed = text.substr(0, text.size() - 1) + R"(, "assumed_layers": [1]})";
  EXPECT_EQ(parse_coverage(guessed, "c.json").assumed_layers, std::vector<int>{1});
  for (const char* wrong : {"7", "[2]", "[-1]", "[1, 0]", "[0, 0]", "[0.5]", "[\"0\"]"})
    EXPECT_NE(
        with("\"layers\"", fmt::format("\"assumed_layers\": {}, \"layers\"", wrong)).find("`assumed_layers` must"),
        std::string::npos)
        << wrong;
  TemporaryFolder folder;
  std::ofstream(folder.path("whole.json")) << text;
  std::ofstream(folder.path("guessed.json")) << guessed;
  testing::internal::CaptureStderr();
  find_coverage(folder.path("whole.json"), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  find_coverage(folder.path("guessed.json"), 2);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("guessed.json: nothing was measured in layers 1;"),
            std::string::npos);
  EXPECT_NE(message_of([] { find_coverage("power:x", 2); }).find("not a number"), std::string::npos);
  EXPECT_NE(message_of([] { find_coverage("power:-1", 2); }).find("exponent"), std::string::npos);
  EXPECT_NE(message_of([] { find_coverage("nothing.json", 2); }).find("unknown coverage"), std::string::npos);
}

TEST(LengthPool, NamedPoolsHaveTheirShape) {
  for (const std::string& name : named_length_pools()) {
    const auto pool = find_lengths(name);
    EXPECT_EQ(pool.size(), 20000u);
    for (int64_t length : pool) ASSERT_GT(length, 0);
  }
  const auto chat = find_lengths("chatqa2-like");
  const auto below = [&](int64_t limit) {
    return std::count_if(chat.begin(), chat.end(), [&](int64_t n) { return n < limit; }) / 20000.0;
  };
  // Published shares of the set it is modelled on.
  EXPECT_NEAR(below(1024), 0.2192, 0.02);
  EXPECT_NEAR(below(4096), 0.3148, 0.02);
  EXPECT_NEAR(below(8192), 0.4043, 0.02);
  EXPECT_NEAR(below(32768), 0.9986, 0.003);
}

TEST(LengthPool, FilesAndComplaints) {
  EXPECT_EQ(parse_lengths("12\n# a comment\n\n 7 \r\n5", "f"), (std::vector<int64_t>{12, 7, 5}));
  EXPECT_NE(message_of([] { parse_lengths("", "f.txt"); }).find("no lengths"), std::string::npos);
  EXPECT_NE(message_of([] { parse_lengths("3\n0\n", "f.txt"); }).find("f.txt:2"), std::string::npos);
  EXPECT_NE(message_of([] { parse_lengths("3\n-5\n", "f.txt"); }).find("positive"), std::string::npos);
  EXPECT_NE(message_of([] { parse_lengths("3\n4x\n", "f.txt"); }).find("4x"), std::string::npos);
  EXPECT_NE(message_of([] { parse_lengths("99999999999999999999\n", "f.txt"); }).find("f.txt:1"), std::string::npos);
}

TEST(LengthPool, EveryLengthOnceAnEpoch) {
  std::vector<int64_t> pool{10, 20, 30, 40, 50};
  LengthSampler sampler(pool, 1);
  auto first = sampler.next(5);
  std::vector<int64_t> seen;
  for (const Sequence& s : first) seen.push_back(s.tokens);
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, pool);
  EXPECT_EQ(sampler.next(1)[0].id, 5);
}

}  // namespace
}  // namespace sb
