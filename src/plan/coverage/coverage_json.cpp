#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "plan/coverage/coverage.h"
#include "plan/coverage/coverage_statistics.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

std::vector<int64_t> ascending(const Json& json, const char* key, const std::string& where) {
  SB_USER_CHECK(json.contains(key) && json[key].is_array() && !json[key].empty(), "{}: `{}` must be a list of integers",
                where, key);
  std::vector<int64_t> out;
  for (const Json& item : json[key]) {
    SB_USER_CHECK(item.is_number_integer() && item.get<int64_t>() > (out.empty() ? 0 : out.back()),
                  "{}: `{}` must hold positive integers in ascending order", where, key);
    out.push_back(item.get<int64_t>());
  }
  return out;
}

}  // namespace

CoverageTable parse_coverage(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  SB_USER_CHECK(json.is_object() && json.contains("format") && json["format"] == "sparsebalance-coverage",
                "{}: is not a coverage file (`format` must be \"sparsebalance-coverage\")", where);
  SB_USER_CHECK(json.contains("version") && json["version"] == CoverageTable::kVersion, "{}: `version` must be {}",
                where, CoverageTable::kVersion);
  CoverageTable table;
  SB_USER_CHECK(json.contains("layers") && json["layers"].is_number_integer() && json["layers"].get<int64_t>() > 0 &&
                    json["layers"].get<int64_t>() <= kMostLayers,
                "{}: `layers` must be an integer from 1 to {}", where, kMostLayers);
  table.layers = json["layers"].get<int>();
  table.length_classes = ascending(json, "length_classes", where);
  table.budgets = ascending(json, "budgets", where);
  SB_USER_CHECK(
      json.contains("coverage") && json["coverage"].is_array() && std::ssize(json["coverage"]) == table.layers,
      "{}: `coverage` must hold one list per layer ({})", where, table.layers);
  for (const Json& layer : json["coverage"]) {
    auto& classes = table.coverage.emplace_back();
    SB_USER_CHECK(layer.is_array() && layer.size() == table.length_classes.size(),
                  "{}: `coverage` of layer {} must hold one list per length class ({})", where,
                  table.coverage.size() - 1, table.length_classes.size());
    for (const Json& curve : layer) {
      auto& values = classes.emplace_back();
      SB_USER_CHECK(curve.is_array() && curve.size() == table.budgets.size(),
                    "{}: `coverage` of layer {}, class {} must hold one value per budget ({})", where,
                    table.coverage.size() - 1, classes.size() - 1, table.budgets.size());
      double last = 0;
      for (const Json& item : curve) {
        SB_USER_CHECK(item.is_number() && item.get<double>() >= last && item.get<double>() <= 1.0,
                      "{}: `coverage` of layer {}, class {} must rise from 0 to at most 1", where,
                      table.coverage.size() - 1, classes.size() - 1);
        last = item.get<double>();
        values.push_back(last);
      }
    }
  }
  if (json.contains("assumed_layers")) {
    const Json& layers = json["assumed_layers"];
    SB_USER_CHECK(layers.is_array(), "{}: `assumed_layers` must be a list of layers", where);
    for (const Json& layer : layers) {
      const int64_t before = table.assumed_layers.empty() ? -1 : table.assumed_layers.back();
      SB_USER_CHECK(layer.is_number_integer() && layer.get<int64_t>() > before && layer.get<int64_t>() < table.layers,
                    "{}: `assumed_layers` must hold layers from 0 to {} in ascending order", where, table.layers - 1);
      table.assumed_layers.push_back(layer.get<int>());
    }
  }
  return table;
}

std::string write_coverage(const CoverageTable& table) {
  const Json json = {
      {"format", "sparsebalance-coverage"},     {"version", CoverageTable::kVersion}, {"layers", table.layers},
      {"length_classes", table.length_classes}, {"budgets", table.budgets},           {"coverage", table.coverage},
      {"assumed_layers", table.assumed_layers}};
  return json.dump() + "\n";
}

}  // namespace sb
