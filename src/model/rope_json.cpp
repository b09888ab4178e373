#include "model/rope_json.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/errors.h"

namespace sb {

namespace {

using nlohmann::ordered_json;

struct TypeName {
  RopeConfig::Type type;
  const char* name;
};
constexpr TypeName kTypes[] = {{RopeConfig::Type::standard, "default"},
                               {RopeConfig::Type::linear, "linear"},
                               {RopeConfig::Type::llama3, "llama3"},
                               {RopeConfig::Type::yarn, "yarn"}};

// Which key names the type: "type" in old files, "rope_type" in newer ones.
const char* type_key(const ordered_json& parameters) {
  return parameters.contains("rope_type") || !parameters.contains("type") ? "rope_type" : "type";
}

RopeConfig::Type read_type(const JsonObject& json, const std::string& name) {
  for (const TypeName& known : kTypes) {
    if (name == known.name) return known.type;
  }
  throw UserError("{}: rope type '{}' is not supported; supported are default, linear, llama3, yarn", json.where(),
                  name);
}

void read_parameters(const JsonObject& json, int64_t max_position_embeddings, RopeConfig& rope) {
  rope.type = read_type(json, json.has("rope_type") ? json.text("rope_type") : json.text_or("type", "default"));
  SB_USER_CHECK(json.number_or("partial_rotary_factor", 1.0) == 1.0, "{}: partial_rotary_factor is not supported",
                json.where());
  switch (rope.type) {
    case RopeConfig::Type::standard:
      break;
    case RopeConfig::Type::linear:
      rope.factor = json.number("factor");
      break;
    case RopeConfig::Type::llama3:
      rope.factor = json.number("factor");
      rope.low_freq_factor = json.number("low_freq_factor");
      rope.high_freq_factor = json.number("high_freq_factor");
      rope.original_max_position_embeddings = json.integer("original_max_position_embeddings");
      break;
    case RopeConfig::Type::yarn:
      rope.factor = json.number("factor");
      rope.original_max_position_embeddings =
          json.integer_or("original_max_position_embeddings", max_position_embeddings);
      rope.beta_fast = json.number_or("beta_fast", 32.0);
      rope.beta_slow = json.number_or("beta_slow", 1.0);
      rope.attention_factor = json.number_or("attention_factor", 0.0);
      rope.mscale = json.number_or("mscale", 0.0);
      rope.mscale_all_dim = json.number_or("mscale_all_dim", 0.0);
      rope.truncate = json.flag_or("truncate", true);
      break;
  }
}

// Everything but theta.
ordered_json parameters_json(const RopeConfig& rope, const char* key) {
  ordered_json json = ordered_json::object();
  for (const TypeName& known : kTypes) {
    if (known.type == rope.type) json[key] = known.name;
  }
  if (rope.type == RopeConfig::Type::standard) return json;
  json["factor"] = rope.factor;
  if (rope.type == RopeConfig::Type::linear) return json;
  json["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (rope.type == RopeConfig::Type::llama3) {
    json["low_freq_factor"] = rope.low_freq_factor;
    json["high_freq_factor"] = rope.high_freq_factor;
    return json;
  }
  const RopeConfig defaults;
  if (rope.beta_fast != defaults.beta_fast) json["beta_fast"] = rope.beta_fast;
  if (rope.beta_slow != defaults.beta_slow) json["beta_slow"] = rope.beta_slow;
  if (rope.attention_factor != 0) json["attention_factor"] = rope.attention_factor;
  if (rope.mscale != 0) json["mscale"] = rope.mscale;
  if (rope.mscale_all_dim != 0) json["mscale_all_dim"] = rope.mscale_all_dim;
  if (!rope.truncate) json["truncate"] = false;
  return json;
}

}  // namespace

bool JsonObject::has(const char* key) const {
  return json_.contains(key) && !json_[key].is_null();
}

bool JsonObject::is_null(const char* key) const {
  const auto found = json_.find(key);
  return found != json_.end() && found->is_null();
}

const ordered_json& JsonObject::at(const char* key) const {
  SB_USER_CHECK(has(key), "{}: {} is missing", where_, key);
  return json_[key];
}

std::string JsonObject::text(const char* key) const {
  SB_USER_CHECK(at(key).is_string(), "{}: {} must be a string", where_, key);
  return at(key).get<std::string>();
}

std::string JsonObject::text_or(const char* key, const std::string& otherwise) const {
  return has(key) ? text(key) : otherwise;
}

int64_t JsonObject::integer(const char* key) const {
  const ordered_json& value = at(key);
  // A whole number, not negative and inside int64_t.
  const bool valid = value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{INT64_MAX};
  SB_USER_CHECK(valid, "{}: {} must be a whole number, not negative", where_, key);
  return value.get<int64_t>();
}

int64_t JsonObject::integer_or(const char* key, int64_t otherwise) const {
  return has(key) ? integer(key) : otherwise;
}

int JsonObject::small_integer(const char* key) const {
  const int64_t value = integer(key);
  SB_USER_CHECK(value <= INT32_MAX, "{}: {} is too large: {}", where_, key, value);
  return static_cast<int>(value);
}

double JsonObject::number(const char* key) const {
  SB_USER_CHECK(at(key).is_number(), "{}: {} must be a number", where_, key);
  return at(key).get<double>();
}

double JsonObject::number_or(const char* key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}

bool JsonObject::flag_or(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  SB_USER_CHECK(at(key).is_boolean(), "{}: {} must be true or false", where_, key);
  return at(key).get<bool>();
}

RopeConfig read_rope(const JsonObject& json, int64_t max_position_embeddings) {
  const bool new_spelling = json.has("rope_parameters"), old_scaling = json.has("rope_scaling");
  SB_USER_CHECK(!new_spelling || !old_scaling, "{}: rope_parameters and rope_scaling are both there; remove one",
                json.where());
  RopeConfig rope;
  rope.theta = json.number_or("rope_theta", 10000.0);
  if (!new_spelling && !old_scaling) return rope;
  const char* key = new_spelling ? "rope_parameters" : "rope_scaling";
  SB_USER_CHECK(json.at(key).is_object(), "{}: {} must be an object", json.where(), key);
  const JsonObject parameters(json.at(key), json.where() + ": " + key);
  for (const auto& [name, value] : json.at(key).items()) {
    SB_USER_CHECK(!value.is_object(), "{}: {}: rope parameters by layer type are not supported", parameters.where(),
                  name);
  }
  rope.theta = parameters.number_or("rope_theta", rope.theta);
  read_parameters(parameters, max_position_embeddings, rope);
  return rope;
}

void write_rope(ordered_json& json, const RopeConfig& rope) {
  const auto old_type_key = [&](const char* key) {
    return json.contains(key) && json[key].is_object() ? type_key(json[key]) : "rope_type";
  };
  if (json.contains("rope_parameters") && json["rope_parameters"].is_object()) {
    ordered_json parameters = parameters_json(rope, old_type_key("rope_parameters"));
    parameters["rope_theta"] = rope.theta;
    json["rope_parameters"] = std::move(parameters);
    if (json.contains("rope_theta")) json["rope_theta"] = rope.theta;
    return;
  }
  const char* key = old_type_key("rope_scaling");
  json["rope_theta"] = rope.theta;
  json["rope_scaling"] = rope.type == RopeConfig::Type::standard ? ordered_json() : parameters_json(rope, key);
}

void check_rope(const RopeConfig& rope, const std::string& where) {
  const auto positive = [&](double value, const char* key) {
    SB_USER_CHECK(value > 0 && std::isfinite(value), "{}: rope: {} must be positive, got {}", where, key, value);
  };
  // At 1 every channel would turn alike, and yarn divides by its logarithm.
  SB_USER_CHECK(rope.theta > 1 && std::isfinite(rope.theta), "{}: rope_theta must be above 1, got {}", where,
                rope.theta);
  if (rope.type == RopeConfig::Type::standard) return;
  SB_USER_CHECK(rope.factor >= 1 && std::isfinite(rope.factor), "{}: rope: factor must be at least 1, got {}", where,
                rope.factor);
  if (rope.type == RopeConfig::Type::linear) return;
  SB_USER_CHECK(rope.original_max_position_embeddings > 0,
                "{}: rope: original_max_position_embeddings must be positive, got {}", where,
                rope.original_max_position_embeddings);
  if (rope.type == RopeConfig::Type::llama3) {
    positive(rope.low_freq_factor, "low_freq_factor");
    SB_USER_CHECK(rope.high_freq_factor > rope.low_freq_factor && std::isfinite(rope.high_freq_factor),
                  "{}: rope: high_freq_factor {} must be above low_freq_factor {}", where, rope.high_freq_factor,
                  rope.low_freq_factor);
    return;
  }
  positive(rope.beta_slow, "beta_slow");
  SB_USER_CHECK(rope.beta_fast >= rope.beta_slow && std::isfinite(rope.beta_fast),
                "{}: rope: beta_fast {} must not be below beta_slow {}", where, rope.beta_fast, rope.beta_slow);
  SB_USER_CHECK(rope.attention_factor >= 0 && std::isfinite(rope.attention_factor),
                "{}: rope: attention_factor must be positive, got {}", where, rope.attention_factor);
}

}  // namespace sb
