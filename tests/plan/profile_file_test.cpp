#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "core/random.h"
#include "plan/latency/adapter_profile.h"
#include "plan/latency/latency_model.h"
#include "plan/latency/profile.h"
#include "plan/latency/profile_fit.h"
#include "tests/core/message_of.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

Profile small_profile() {
  Profile profile = analytic_profile("h200-analytic", find_model_shape("qwen2.5-0.5b"));
  profile.attention = {128, 16, "mass", "planes", 32, 0};
  profile.lora_rank = 8;
  profile.prefix_measured = true;
  // Of a processor, which knows links.
  profile.peak_tflops = 0;
  profile.memory_bytes = 0;
  return profile;
}

std::string complaint(const Json& json) {
  return message_of([&] { parse_profile(json.dump(), "p.json"); });
}

// Every key of a file, one after the other: not there, and of another type.
void each_key(const Json& json, const std::string& path, const std::function<void(const std::string&)>& visit) {
  for (const auto& [key, value] : json.items()) {
    visit(path + "/" + key);
    if (value.is_object()) each_key(value, path + "/" + key, visit);
  }
}

TEST(ProfileFile, EveryKeyIsNeededAndOfItsType) {
  const Json whole = Json::parse(write_profile(small_profile()));
  int keys = 0;
  each_key(whole, "", [&](const std::string& path) {
    ++keys;
    const Json::json_pointer pointer(path);
    const std::string key = pointer.back();
    Json without = whole;
    without[pointer.parent_pointer()].erase(key);
    const bool optional = path == "/attention" || path == "/lora_rank" ||
                          path == "/operations/attention_backward/us_per_prefix" || path == "/format";
    if (!optional) {
      EXPECT_NE(complaint(without).find("`" + key + "` is missing"), std::string::npos) << path << complaint(without);
    } else if (path == "/format") {
      EXPECT_NE(complaint(without).find("is not a profile"), std::string::npos);
    } else {
      EXPECT_NO_THROW(parse_profile(without.dump(), "p.json")) << path;
    }
    for (const Json& other : {Json(nullptr), Json(true), Json::array({"a"}), Json("text"), Json(Json::object())}) {
      if (other.type() == whole[pointer].type()) continue;
      Json changed = whole;
      changed[pointer] = other;
      const std::string said = complaint(changed);
      EXPECT_EQ(said.rfind("p.json", 0), 0u) << path << " = " << other << ": " << said;
    }
  });
  EXPECT_GT(keys, 80);  // seven operations of seven keys, and the rest
}

TEST(ProfileFile, NumbersThatNoMachineHasAreRefused) {
  const Json whole = Json::parse(write_profile(small_profile()));
  const struct {
    const char *path, *value, *said;
  } cases[] = {
      {"/version", "0", "profile version 0"},
      {"/version", "18446744073709551615", ".version: 18446744073709551615 is too large"},
      {"/version", "2.0", ".version: must be an integer"},
      {"/lora_rank", "-1", ".lora_rank: -1 is not a valid rank"},
      {"/lora_rank", "65537", ".lora_rank: 65537 is not a valid rank"},
      {"/gpus_per_node", "0", ".gpus_per_node: must be from 1 to"},
      {"/gpus_per_node", "-8", ".gpus_per_node: must be from 1 to"},
      {"/gpus_per_node", "4294967304", ".gpus_per_node: must be from 1 to"},
      {"/memory_bytes", "-1", ".memory_bytes: must be from 0 to"},
      {"/memory_bytes", "-9223372036854775808", ".memory_bytes: must be from 0 to"},
      {"/memory_bytes", "1e9", ".memory_bytes: must be an integer"},
      {"/peak_tflops", "-1", ".peak_tflops: must be a number from 0"},
      {"/peak_tflops", "1e16", ".peak_tflops: must be a number from 0"},
      {"/held_out_error/count", "-1", ".held_out_error.count: must be from 0"},
      {"/held_out_error/median", "-0.1", ".held_out_error.median: must be a number from 0"},
      {"/model/layers", "0", "every size of the model must be positive"},
      {"/model/heads", "-14", "every size of the model must be positive"},
      {"/model/kv_heads", "3", "14 heads cannot share 3 key/value heads evenly"},
      {"/model/head_dim", "4611686018427387904", "no size of the model may exceed"},
      {"/model/layers", "4294967320", "no size of the model may exceed"},
      {"/links/reduce/latency_us", "-1", ".links.reduce.latency_us: must be a number from 0"},
      {"/operations/selection/x", "[0]", ".selection: x and us need the same number"},
      {"/operations/selection/x", "[0, 1, 2]", ".selection: x and us need the same number"},
      {"/operations/selection/x", "[1, 2]", ".selection: x must start at 0"},
      {"/operations/selection/x", "[0, 0.0009]", ".selection: x must rise"},
      {"/operations/selection/x", "[0, -1]", ".selection: x must rise"},
      {"/operations/selection/x", "[0, 1e25]", ".selection.x: must be a list of numbers up to"},
      {"/operations/selection/x", "[0, null]", ".selection.x: must be a list of numbers up to"},
      {"/operations/selection/us", "[-1, 0]", "us at 0 or above"},
      {"/operations/selection/us", "[3, 2]", "us must not fall (entry 1)"},
      {"/operations/selection/us", "[0, 1e16]", ".selection.us: must be a list of numbers up to"},
      {"/operations/head_forward/us_per_prefix", "-1", ".head_forward.us_per_prefix: must be a number"},
      {"/attention/block", "0", "block and query_block must be positive"},
      {"/attention/query_block", "-16", "block and query_block must be positive"},
      {"/attention/score_channels", "-2", "only planes have channels, only the other scores have score tokens"},
  };
  for (const auto& [path, value, said] : cases) {
    Json changed = whole;
    changed[Json::json_pointer(path)] = Json::parse(value);
    const std::string message = complaint(changed);
    EXPECT_EQ(message.rfind("p.json", 0), 0u) << message;
    EXPECT_NE(message.find(said), std::string::npos) << path << " = " << value << ": " << message;
  }
}

TEST(ProfileFile, OtherTextsAreNoProfiles) {
  const std::string whole = write_profile(small_profile());
  for (const std::string& text :
       {std::string(), std::string("null"), std::string("[]"), std::string("7"),
        std::string("\"sparsebalance-profile\""), whole + "x", std::string("\0", 1), std::string(100'000, '[')})
    EXPECT_EQ(message_of([&] { parse_profile(text, "p.json"); }).rfind("p.json: ", 0), 0u) << text.substr(0, 40);
  // Cut off anywhere it is no JSON; one of every few places.
  for (size_t end = 1; end + 1 < whole.size(); end += 97)
    EXPECT_EQ(message_of([&] { parse_profile(whole.substr(0, end), "p.json"); }), "p.json: is not JSON") << end;
}

TEST(ProfileFile, LimitsThemselvesAreTaken) {
  const Json whole = Json::parse(write_profile(small_profile()));
  for (const auto& [path, value] : {std::pair{"/lora_rank", "65536"},
                                    {"/gpus_per_node", "1"},
                                    {"/memory_bytes", "0"},
                                    {"/peak_tflops", "0"},
                                    {"/held_out_error/count", "0"},
                                    {"/model/layers", "1"},
                                    {"/model/vocabulary", "1048576"},
                                    {"/links/transfer/us_per_byte", "0"},
                                    {"/operations/selection/x", "[0, 0.001]"},
                                    {"/operations/selection/us", "[5, 5]"},
                                    {"/operations/linear_forward/us", "[0, 1e15]"}}) {
    Json changed = whole;
    changed[Json::json_pointer(path)] = Json::parse(value);
    EXPECT_NO_THROW(parse_profile(changed.dump(), "p.json")) << path;
  }
}

TEST(ProfileFile, UnknownKeysAndNamesThatAreNoTextDoNotHurt) {
  Profile profile = small_profile();
  profile.name = "a \"quoted\"\n\xff name";
  profile.machine = "\xe4\xbd\xa0 \\ /";
  const Profile again = parse_profile(write_profile(profile), "p.json");
  EXPECT_EQ(again.machine, profile.machine);
  EXPECT_EQ(again.name, "a \"quoted\"\n\xef\xbf\xbd name");  // the replacement character
  Json more = Json::parse(write_profile(profile));
  more["comment"] = {{"by", "hand"}};
  more["operations"]["sleeping"] = 3;
  EXPECT_EQ(write_profile(parse_profile(more.dump(), "p.json")), write_profile(again));
}

// What is told for the backward of attention is asked of all operations; without it, bytes decide.
TEST(ProfileFile, APrefixIsMeasuredForAllOperationsOrForNone) {
  Json json = Json::parse(write_profile(small_profile()));
  json["operations"]["linear_forward"].erase("us_per_prefix");
  EXPECT_NE(complaint(json).find("linear_forward: `us_per_prefix` is missing"), std::string::npos);
  json["operations"]["attention_backward"].erase("us_per_prefix");
  // The bytes move at the rate of this GPU's memory.
  const Profile gpu = analytic_profile("h200-analytic", small_profile().shape);
  json["peak_tflops"] = gpu.peak_tflops;
  json["memory_bytes"] = gpu.memory_bytes;
  json["operations"]["selection"]["us_per_prefix"] = 7.0;
  const Profile profile = parse_profile(json.dump(), "p.json");
  EXPECT_FALSE(profile.prefix_measured);
  EXPECT_EQ(profile.tables[static_cast<size_t>(Operation::selection)].per_prefix, 0);
  // Two heads of 64, key and value, 4 bytes read and written: 2 KB.
  EXPECT_NEAR(profile.tables[static_cast<size_t>(Operation::attention_backward)].per_prefix, 2048 / 4.2e6, 1e-12);
}

// The nearest device that is known by peak, then by memory; otherwise in proportion to the peak.
TEST(ProfileFile, MemoryRateOfAMachineFollowsItsPeakAndItsMemory) {
  Profile profile = small_profile();
  const auto rate = [&](double peak, int64_t gib) {
    profile.peak_tflops = peak;
    profile.memory_bytes = gib << 30;
    assume_prefix(profile);
    return 2048 / profile.tables[static_cast<size_t>(Operation::attention_backward)].per_prefix;
  };
  EXPECT_NEAR(rate(989, 139), 4.2e6, 1);
  EXPECT_NEAR(rate(1000, 80), 2.9e6, 1);   // nearer to an H100
  EXPECT_NEAR(rate(310, 40), 1.75e6, 1);   // an A100 whatever its memory
  EXPECT_NEAR(rate(150, 0), 3.5e6, 1);     // no word about memory
  EXPECT_NEAR(rate(494.5, 48), 2.1e6, 1);  // half the peak of an H200
  EXPECT_NEAR(rate(0, 64), 2e4, 1e-6);     // a processor
}

TEST(ProfileFile, FilesAreFoundByPathAndNamedByIt) {
  TemporaryFolder folder;
  const std::string path = folder.path("mine.json");
  const ModelShape shape = find_model_shape("qwen2.5-0.5b");
  std::ofstream(path) << write_profile(small_profile());
  EXPECT_EQ(find_profile(path, shape, {}).name, path);
  EXPECT_NE(message_of([&] { with_adapters(find_profile(path, shape, {}), 4); }).find(path + ": was measured with"),
            std::string::npos);
  std::ofstream(path, std::ios::trunc) << "{}";
  EXPECT_EQ(message_of([&] { find_profile(path, shape, {}); }).rfind(path + ": is not a profile", 0), 0u);
  for (const char* name : {"h200-analytics", "H200", "", "h300"})
    EXPECT_NE(message_of([&] { find_profile(name, shape, {}); }).find("neither built in (h200-analytic, "),
              std::string::npos)
        << name;
  EXPECT_NE(
      message_of([&] { analytic_profile("b200-analytic", shape); }).find("choose from h200-analytic, h100-analytic"),
      std::string::npos);
}

// By the normal equations, solved for every subset of columns that may be above zero.
std::vector<double> best_of_subsets(const std::vector<double>& a, const std::vector<double>& b) {
  double least = INFINITY;
  std::vector<double> best(2, 0.0);
  const auto consider = [&](double x, double y) {
    if (x < 0 || y < 0) return;
    double error = 0;
    for (size_t r = 0; r < b.size(); ++r) error += std::pow(a[2 * r] * x + a[2 * r + 1] * y - b[r], 2);
    if (error < least) {
      least = error;
      best = {x, y};
    }
  };
  double xx = 0, xy = 0, yy = 0, xb = 0, yb = 0;
  for (size_t r = 0; r < b.size(); ++r) {
    xx += a[2 * r] * a[2 * r];
    xy += a[2 * r] * a[2 * r + 1];
    yy += a[2 * r + 1] * a[2 * r + 1];
    xb += a[2 * r] * b[r];
    yb += a[2 * r + 1] * b[r];
  }
  const double determinant = xx * yy - xy * xy;
  consider(0, 0);
  consider(xb / xx, 0);
  consider(0, yb / yy);
  consider((xb * yy - yb * xy) / determinant, (yb * xx - xb * xy) / determinant);
  return best;
}

TEST(ProfileFit, LeastSquaresOfTwoColumnsAreTheBestOfAllSubsets) {
  Random random(8);
  int on_a_border = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<double> a, b;
    for (int r = 0; r < 6; ++r) {
      a.push_back(random.normal());
      a.push_back(1000 * random.normal());
      b.push_back(random.normal());
    }
    const auto expected = best_of_subsets(a, b), found = nonnegative_least_squares(a, b, 2);
    EXPECT_NEAR(found[0], expected[0], 1e-8) << trial;
    EXPECT_NEAR(1000 * found[1], 1000 * expected[1], 1e-8) << trial;
    on_a_border += expected[0] == 0 || expected[1] == 0 ? 1 : 0;
  }
  EXPECT_GT(on_a_border, 20);
  EXPECT_LT(on_a_border, 200);
}

TEST(ProfileFit, ColumnsOfNothingAndNoRowsAreZero) {
  EXPECT_EQ(nonnegative_least_squares({}, {}, 3), std::vector<double>(3, 0.0));
  const std::vector<double> a{0, 2, 0, 4};
  const auto x = nonnegative_least_squares(a, std::vector<double>{1, 2}, 2);
  EXPECT_EQ(x[0], 0);
  EXPECT_NEAR(x[1], 0.5, 1e-12);
  EXPECT_THROW(nonnegative_least_squares(a, std::vector<double>{1, 2}, 3), Error);
}

TEST(ProfileFit, LinksOfOddMeasurements) {
  const auto link = [](std::vector<std::pair<double, double>> samples) { return fit_link(samples); };
  EXPECT_EQ(link({}).latency_us, 0);
  EXPECT_EQ(link({{1e6, 0}, {2e6, -1}}).us_per_byte, 0);  // clocks that did not move teach nothing
  // The same time whatever is sent: all of it is latency. Proportional: none of it is.
  EXPECT_NEAR(link({{1e3, 7}, {1e6, 7}}).latency_us, 7, 1e-9);
  EXPECT_NEAR(link({{1e3, 7}, {1e6, 7}}).us_per_byte, 0, 1e-12);
  EXPECT_NEAR(link({{1e3, 1}, {1e6, 1000}}).latency_us, 0, 1e-9);
  EXPECT_NEAR(link({{1e3, 1}, {1e6, 1000}}).us_per_byte, 1e-3, 1e-12);
  // Faster for more bytes: no rate below zero.
  EXPECT_EQ(link({{1e3, 20}, {1e6, 10}}).us_per_byte, 0);
}

TEST(ProfileFit, TablesOfFewSamples) {
  Work one;
  one.tokens = 50;
  // A single sample lies on the line; without a fixed time the line begins at nothing.
  const std::vector<LatencySample> single{{one, 20}};
  EXPECT_NEAR(fit_table(Coordinate::tokens, single, {})(one), 20, 1e-6);
  const OperationTable proportional = fit_table(Coordinate::tokens, single, {.fixed = false});
  EXPECT_EQ(proportional.curve.y[0], 0);
  EXPECT_NEAR(proportional(one), 20, 1e-6);
  one.tokens = 100;
  EXPECT_NEAR(proportional(one), 40, 1e-6);
  // Samples without the coordinate have but the fixed time.
  const std::vector<LatencySample> empty{{{}, 3}, {{}, 3}};
  EXPECT_NEAR(fit_table(Coordinate::pairs, empty, {})({}), 3, 1e-9);
  EXPECT_THROW(fit_table(Coordinate::pairs, {}, {}), Error);
  // No more pieces than asked for, whatever was measured.
  std::vector<LatencySample> many;
  for (int i = 1; i <= 40; ++i) {
    Work work;
    work.tokens = std::pow(1.5, i);
    many.push_back({work, 5 + work.tokens});
  }
  for (const int knots : {1, 2, 6}) {
    const OperationTable table = fit_table(Coordinate::tokens, many, {}, knots);
    EXPECT_EQ(table.curve.x.size(), static_cast<size_t>(knots) + 1);
    for (const LatencySample& sample : many) EXPECT_NEAR(table(sample.work), sample.us, 1e-6 * sample.us);
  }
}

}  // namespace
}  // namespace sb
