#include "cli/eval/eval_rows.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb {

struct RowObject {
  nlohmann::ordered_json json;
};

namespace {

using Json = nlohmann::ordered_json;

Row row_of(Json object, std::string place) {
  SB_USER_CHECK(object.is_object(), "{}: not a JSON object", place);
  return {std::make_shared<const RowObject>(RowObject{std::move(object)}), std::move(place)};
}

std::vector<Row> read_lines(const std::string& path, const std::string& text, int64_t limit) {
  std::istringstream file(text);
  std::vector<Row> rows;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    if (limit > 0 && std::ssize(rows) == limit) break;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string place = fmt::format("{}:{}", path, number);
    try {
      rows.push_back(row_of(Json::parse(line), place));
    } catch (const nlohmann::json::exception& error) {
      throw UserError("{}: not a JSON object: {}", place, error.what());
    }
  }
  return rows;
}

std::vector<Row> read_array(const std::string& path, const std::string& text, int64_t limit) {
  Json array;
  try {
    array = Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw UserError("{}: not a JSON array: {}", path, error.what());
  }
  std::vector<Row> rows;
  for (Json& object : array) {
    if (limit > 0 && std::ssize(rows) == limit) break;
    const std::string place = fmt::format("{}: question {}", path, rows.size());
    rows.push_back(row_of(std::move(object), place));
  }
  return rows;
}

bool begins_an_array(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '[';
}

template <typename T>
T field(const Row& row, const char* key) {
  try {
    return row.object->json.at(key).get<T>();
  } catch (const nlohmann::json::exception&) {
    throw UserError("{}: key \"{}\" is missing or has the wrong type", row.place, key);
  }
}

}  // namespace

std::string Row::text(const char* key) const {
  return field<std::string>(*this, key);
}

std::vector<std::string> Row::texts(const char* key) const {
  return field<std::vector<std::string>>(*this, key);
}

std::vector<std::string> Row::values(const char* key) const {
  const Json value = object->json.contains(key) ? object->json.at(key) : Json();
  std::vector<std::string> values;
  for (const Json& one : value.is_array() ? value : Json::array({value})) {
    SB_USER_CHECK(one.is_string() || one.is_number(), "{}: key \"{}\" is missing or has the wrong type", place, key);
    values.push_back(one.is_string() ? one.get<std::string>() : one.dump());
  }
  SB_USER_CHECK(!values.empty(), "{}: key \"{}\" is an empty list", place, key);
  return values;
}

bool Row::has(const char* key) const {
  return object->json.contains(key) && !object->json.at(key).is_null();
}

void add_files(CLI::App* command, BenchmarkFiles& files, const char* input_help) {
  command->add_option("--input", files.input, input_help)->required();
  command->add_option("--predictions", files.predictions,
                      "JSONL with \"pred\" on every line, to score instead of running a model");
  command->add_option("--limit", files.limit, "only the first N questions; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
}

std::vector<Row> read_rows(const BenchmarkFiles& files) {
  const std::string text = read_regular_file(files.input);
  std::vector<Row> rows = files.takes_an_array && begins_an_array(text) ? read_array(files.input, text, files.limit)
                                                                        : read_lines(files.input, text, files.limit);
  SB_USER_CHECK(!rows.empty(), "{}: is empty", files.input);
  return rows;
}

std::vector<std::string> read_predictions(const BenchmarkFiles& files, const std::vector<Row>& rows) {
  BenchmarkFiles from;
  from.input = files.predictions;
  from.limit = files.limit;
  const std::vector<Row> given = read_rows(from);
  SB_USER_CHECK(given.size() == rows.size(), "{}: {} predictions for {} questions", files.predictions, given.size(),
                rows.size());
  std::vector<std::string> texts;
  for (const Row& row : given) texts.push_back(row.text("pred"));
  return texts;
}

EvalModel open_model_to_run(const EvalOptions& options) {
  SB_USER_CHECK(!options.model.empty(), "pass a --model to run, or --predictions to score");
  return open_model(options);
}

void MeanScore::add(double score) {
  ++samples_;
  sum_ += score;
  squares_ += score * score;
}

double MeanScore::mean() const {
  return samples_ == 0 ? 0 : 100 * sum_ / static_cast<double>(samples_);
}

std::optional<double> MeanScore::standard_error() const {
  if (samples_ < 2) return {};
  const auto n = static_cast<double>(samples_);
  return 100 * std::sqrt(std::max(0.0, squares_ - sum_ * sum_ / n) / (n - 1) / n);
}

std::string MeanScore::text() const {
  return fmt::format("{:.2f}{} over {} samples", mean(), plus_minus(standard_error()), samples_);
}

std::string MeanScore::json() const {
  Json object = {{"score", mean()}, {"standard_error", nullptr}, {"samples", samples_}};
  if (standard_error()) object["standard_error"] = *standard_error();
  return object.dump();
}

std::string plus_minus(std::optional<double> error) {
  return error ? fmt::format(" ± {:.2f}", *error) : "";
}

}  // namespace sb
