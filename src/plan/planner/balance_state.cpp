#include "plan/planner/balance_state.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/errors.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kVersion = 1;

Json to_json(const BalanceState& state) {
  // A curve is [layer, length class, seen, held seen, shift, ppm …].
  Json curves = Json::array();
  for (const auto& [key, curve] : state.coverage.curves()) {
    Json row = {key.first, key.second, curve.seen, curve.held_seen, curve.shift_ppm};
    for (const int64_t ppm : curve.ppm) row.push_back(ppm);
    curves.push_back(std::move(row));
  }
  return {{"step", state.step},
          {"corrections_ppm", state.corrections_ppm},
          {"expected_budgets_ppm", state.expected_budgets_ppm},
          {"overhead_ns", state.overhead_ns},
          {"curves", std::move(curves)}};
}

const Json& field(const Json& json, const char* key, const std::string& where) {
  const auto found = json.find(key);
  SB_USER_CHECK(found != json.end(), "{}: the balance state lacks `{}`", where, key);
  return *found;
}

int64_t whole_number(const Json& value, int64_t least, const std::string& where) {
  SB_USER_CHECK(value.is_number_integer() && value.get<int64_t>() >= least &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX),
                "{}: the balance state holds {} where an integer of at least {} belongs", where,
                value.is_structured() ? value.type_name() : value.dump(), least);
  return value.get<int64_t>();
}

const Json& list_of(const Json& value, size_t size, const std::string& where) {
  SB_USER_CHECK(value.is_array() && (size == 0 || value.size() == size), "{}: the balance state has a list too short",
                where);
  return value;
}

BalanceState from_json(const Json& json, const std::string& where) {
  BalanceState state;
  SB_USER_CHECK(json.is_object(), "{}: the balance state is damaged", where);
  state.step = whole_number(field(json, "step", where), 0, where);
  const Json& corrections = list_of(field(json, "corrections_ppm", where), kOperations, where);
  for (size_t i = 0; i < kOperations; ++i) state.corrections_ppm[i] = whole_number(corrections[i], 1, where);
  for (const Json& item : list_of(field(json, "expected_budgets_ppm", where), 0, where))
    state.expected_budgets_ppm.push_back(whole_number(item, 0, where));
  state.overhead_ns = whole_number(field(json, "overhead_ns", where), INT64_MIN, where);
  CoverageStatistics::Curves curves;
  for (const Json& row : list_of(field(json, "curves", where), 0, where)) {
    list_of(row, 5 + CoverageStatistics::kPoints, where);
    CoverageStatistics::Curve curve;
    curve.seen = whole_number(row[2], 1, where);
    curve.held_seen = whole_number(row[3], 0, where);
    curve.shift_ppm = whole_number(row[4], INT64_MIN, where);
    for (size_t i = 0; i < curve.ppm.size(); ++i) curve.ppm[i] = whole_number(row[5 + i], 0, where);
    // What is too large for a layer or a length class is damaged, and stays so as the largest int.
    const auto whole = [&](size_t i) {
      return static_cast<int>(std::min<int64_t>(whole_number(row[i], 0, where), std::numeric_limits<int>::max()));
    };
    curves[{whole(0), whole(1)}] = curve;
  }
  state.coverage.set_curves(std::move(curves), where);
  return state;
}

}  // namespace

BalanceState::BalanceState() {
  corrections_ppm.fill(1'000'000);
}

std::string write_balance_states(const std::vector<BalanceState>& states) {
  Json list = Json::array();
  for (const BalanceState& state : states) list.push_back(to_json(state));
  return Json{{"version", kVersion}, {"states", std::move(list)}}.dump();
}

std::vector<BalanceState> parse_balance_states(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  SB_USER_CHECK(json.is_object() && json.contains("version") && json["version"] == kVersion,
                "{}: the balance state is damaged or of another version (this program reads {})", where, kVersion);
  std::vector<BalanceState> states;
  for (const Json& item : list_of(field(json, "states", where), 0, where)) {
    states.push_back(from_json(item, where));
    SB_USER_CHECK(states.size() == 1 || states[states.size() - 2].step < states.back().step,
                  "{}: the balance states are out of order", where);
  }
  SB_USER_CHECK(!states.empty(), "{}: the balance state is empty", where);
  return states;
}

}  // namespace sb
