#include "plan/latency/model_shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb {
namespace {

// No model has as much of anything, and numbers of parameters stay integers of 64 bits.
constexpr int64_t kLargestSize = 1 << 20;

const std::vector<ModelShape>& shapes() {
  // name, layers, hidden, heads, kv heads, head dim, intermediate, vocabulary, tied
  static const std::vector<ModelShape> all = {
      {"qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, true},
      {"qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, true},
      {"qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, true},
      {"qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, false},
      {"qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, false},
      {"qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, false},
      {"qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, false},
      {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, true},
      {"llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, true},
      {"llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, false},
      {"llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, false},
      {"qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, true},
      {"qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, true},
      {"qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, false},
      {"qwen2-25m", 8, 512, 8, 2, 64, 1408, 8192, true},
  };
  return all;
}

int64_t integer(const nlohmann::json& json, const char* key, const std::string& where) {
  const auto found = json.find(key);
  SB_USER_CHECK(found != json.end() && found->is_number_integer(), "{}: `{}` must be an integer", where, key);
  return found->get<int64_t>();
}

}  // namespace

ModelShape ModelShape::of_rank(int64_t tp) const {
  ModelShape own = *this;
  own.heads = heads / tp;
  own.kv_heads = std::max<int64_t>(kv_heads / tp, 1);
  own.intermediate = intermediate / tp;
  own.vocabulary = (vocabulary + tp - 1) / tp;
  return own;
}

std::string tensor_parallel_problem(const ModelShape& shape, int64_t tp) {
  if (shape.heads % tp != 0) return fmt::format("it does not divide the {} heads of {}", shape.heads, shape.name);
  if (shape.kv_heads % tp != 0 && tp % shape.kv_heads != 0)
    return fmt::format("it neither divides the {} key/value heads of {} nor is a multiple of them", shape.kv_heads,
                       shape.name);
  if (shape.intermediate % tp != 0)
    return fmt::format("it does not divide the MLP of {}, which has {} channels", shape.name, shape.intermediate);
  return {};
}

std::string sparse_tensor_parallel_problem(const ModelShape& shape, int64_t tp) {
  if (tp > shape.kv_heads)
    return fmt::format(
        "{} has {} key/value heads, and sparse attention makes one list for all query heads of each, which ranks "
        "cannot share",
        shape.name, shape.kv_heads);
  return tensor_parallel_problem(shape, tp);
}

bool same_sizes(const ModelShape& a, const ModelShape& b) {
  return a.layers == b.layers && a.hidden == b.hidden && a.heads == b.heads && a.kv_heads == b.kv_heads &&
         a.head_dim == b.head_dim && a.intermediate == b.intermediate && a.vocabulary == b.vocabulary;
}

std::string describe(const ModelShape& shape) {
  return fmt::format("{} layers, hidden {}, {}/{} heads of {}, intermediate {}, vocabulary {}", shape.layers,
                     shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocabulary);
}

void check_model_shape(const ModelShape& shape, const std::string& where) {
  SB_USER_CHECK(shape.layers > 0 && shape.hidden > 0 && shape.heads > 0 && shape.kv_heads > 0 && shape.head_dim > 0 &&
                    shape.intermediate > 0 && shape.vocabulary > 0,
                "{}: every size of the model must be positive ({})", where, describe(shape));
  SB_USER_CHECK(std::max({shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate,
                          shape.vocabulary}) <= kLargestSize,
                "{}: no size of the model may exceed {} ({})", where, kLargestSize, describe(shape));
  SB_USER_CHECK(shape.heads % shape.kv_heads == 0, "{}: {} heads cannot share {} key/value heads evenly", where,
                shape.heads, shape.kv_heads);
}

std::vector<std::string> named_model_shapes() {
  std::vector<std::string> names;
  for (const ModelShape& shape : shapes()) names.push_back(shape.name);
  return names;
}

ModelShape find_model_shape(const std::string& name_or_path) {
  for (const ModelShape& shape : shapes())
    if (shape.name == name_or_path) return shape;
  std::filesystem::path path = name_or_path;
  if (std::filesystem::is_directory(path)) path /= "config.json";
  std::error_code unknown;
  SB_USER_CHECK(std::filesystem::exists(path, unknown) || unknown,
                "unknown model `{}`; it is neither a known name ({}) nor a readable config.json", name_or_path,
                fmt::join(named_model_shapes(), ", "));
  const std::string where = path.string();
  const auto json = nlohmann::json::parse(read_regular_file(path), nullptr, false);
  SB_USER_CHECK(json.is_object(), "{}: is not a JSON object", where);
  ModelShape shape;
  shape.name = path.parent_path().filename().string();
  if (shape.name.empty()) shape.name = path.stem().string();
  shape.layers = integer(json, "num_hidden_layers", where);
  shape.hidden = integer(json, "hidden_size", where);
  shape.heads = integer(json, "num_attention_heads", where);
  SB_USER_CHECK(shape.heads > 0, "{}: `num_attention_heads` must be positive", where);
  shape.kv_heads = json.contains("num_key_value_heads") ? integer(json, "num_key_value_heads", where) : shape.heads;
  shape.head_dim = json.contains("head_dim") && !json["head_dim"].is_null() ? integer(json, "head_dim", where)
                                                                            : shape.hidden / shape.heads;
  shape.intermediate = integer(json, "intermediate_size", where);
  shape.vocabulary = integer(json, "vocab_size", where);
  if (const auto tied = json.find("tie_word_embeddings"); tied != json.end()) {
    SB_USER_CHECK(tied->is_boolean(), "{}: `tie_word_embeddings` must be true or false", where);
    shape.tied = tied->get<bool>();
  }
  check_model_shape(shape, where);
  return shape;
}

}  // namespace sb
