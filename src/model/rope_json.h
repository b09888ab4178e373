#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "ops/rope.h"

namespace sb {

// Typed access to the keys of config.json; null counts as not there. UserError names file and key.
class JsonObject {
 public:
  JsonObject(const nlohmann::ordered_json& json, std::string where) : json_(json), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  bool has(const char* key) const;
  // The key is there, and null: not what a missing one means where the default is something.
  bool is_null(const char* key) const;
  const nlohmann::ordered_json& at(const char* key) const;
  std::string text(const char* key) const;
  std::string text_or(const char* key, const std::string& otherwise) const;
  int64_t integer(const char* key) const;
  int64_t integer_or(const char* key, int64_t otherwise) const;
  int small_integer(const char* key) const;
  double number(const char* key) const;
  double number_or(const char* key, double otherwise) const;
  bool flag_or(const char* key, bool otherwise) const;

 private:
  const nlohmann::ordered_json& json_;
  std::string where_;
};

RopeConfig read_rope(const JsonObject& json, int64_t max_position_embeddings);
// In the spelling `json` has; rope_theta + rope_scaling (which every version reads) when it has none.
void write_rope(nlohmann::ordered_json& json, const RopeConfig& rope);
void check_rope(const RopeConfig& rope, const std::string& where);

}  // namespace sb
