#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "plan/latency/profile.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kCoordinates[] = {"tokens", "tiles", "pairs", "scores"};
// Beyond all that a machine could take, and small enough that sums and products of them stay numbers.
constexpr double kLargest = 1e15, kLargestCoordinate = 1e24, kLeastStep = 1e-3;
constexpr int64_t kMostGpus = 1 << 20, kMostBytes = int64_t{1} << 60;

// Reads keys of one object and names the file and the key in every complaint.
class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    SB_USER_CHECK(json_.is_object(), "{}: must be an object", where_);
  }
  bool has(const char* key) const { return json_.contains(key); }
  Reader child(const char* key) const { return {get(key), where_ + "." + key}; }
  double number(const char* key) const {
    const Json& value = get(key);
    SB_USER_CHECK(value.is_number() && value.get<double>() >= 0 && value.get<double>() <= kLargest,
                  "{}.{}: must be a number from 0 to {:.0e}", where_, key, kLargest);
    return value.get<double>();
  }
  int64_t integer(const char* key) const {
    const Json& value = get(key);
    SB_USER_CHECK(value.is_number_integer(), "{}.{}: must be an integer", where_, key);
    SB_USER_CHECK(!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX, "{}.{}: {} is too large", where_,
                  key, value.get<uint64_t>());
    return value.get<int64_t>();
  }
  int64_t count(const char* key, int64_t least, int64_t most) const {
    const int64_t value = integer(key);
    SB_USER_CHECK(value >= least && value <= most, "{}.{}: must be from {} to {}, got {}", where_, key, least, most,
                  value);
    return value;
  }
  std::string text(const char* key) const {
    const Json& value = get(key);
    SB_USER_CHECK(value.is_string(), "{}.{}: must be a string", where_, key);
    return value.get<std::string>();
  }
  std::vector<double> numbers(const char* key, double largest) const {
    const Json& value = get(key);
    SB_USER_CHECK(value.is_array(), "{}.{}: must be a list of numbers", where_, key);
    std::vector<double> out;
    for (const Json& item : value) {
      SB_USER_CHECK(item.is_number() && std::abs(item.get<double>()) <= largest,
                    "{}.{}: must be a list of numbers up to {:.0e}", where_, key, largest);
      out.push_back(item.get<double>());
    }
    return out;
  }
  const std::string& where() const { return where_; }

 private:
  const Json& get(const char* key) const {
    const auto found = json_.find(key);
    SB_USER_CHECK(found != json_.end(), "{}: `{}` is missing", where_, key);
    return *found;
  }
  const Json& json_;
  std::string where_;
};

OperationTable read_table(const Reader& reader, bool prefix) {
  OperationTable table;
  const std::string along = reader.text("along");
  const auto* found = std::find(std::begin(kCoordinates), std::end(kCoordinates), along);
  SB_USER_CHECK(found != std::end(kCoordinates), "{}.along: `{}` is not one of tokens, tiles, pairs, scores",
                reader.where(), along);
  table.along = static_cast<Coordinate>(found - std::begin(kCoordinates));
  table.curve.x = reader.numbers("x", kLargestCoordinate);
  table.curve.y = reader.numbers("us", kLargest);
  const auto& [x, y] = table.curve;
  SB_USER_CHECK(x.size() >= 2 && x.size() == y.size(), "{}: x and us need the same number of values, two or more",
                reader.where());
  SB_USER_CHECK(x[0] == 0 && y[0] >= 0, "{}: x must start at 0 and us at 0 or above", reader.where());
  for (size_t i = 1; i < x.size(); ++i)
    SB_USER_CHECK(x[i] - x[i - 1] >= kLeastStep && y[i] >= y[i - 1],
                  "{}: x must rise, by {} or more, and us must not fall (entry {})", reader.where(), kLeastStep, i);
  table.per_tile = reader.number("us_per_tile");
  table.per_token = reader.number("us_per_token");
  table.per_score = reader.number("us_per_score");
  if (prefix) table.per_prefix = reader.number("us_per_prefix");
  return table;
}

Json table_json(const OperationTable& table, bool prefix) {
  Json json = {{"along", kCoordinates[static_cast<int>(table.along)]},
               {"x", table.curve.x},
               {"us", table.curve.y},
               {"us_per_tile", table.per_tile},
               {"us_per_token", table.per_token},
               {"us_per_score", table.per_score}};
  if (prefix) json["us_per_prefix"] = table.per_prefix;
  return json;
}

Json link_json(const Link& link) {
  return {{"latency_us", link.latency_us}, {"us_per_byte", link.us_per_byte}};
}
// Of a processor: one process measured what its memory does.
Json links_json(const Links& links) {
  return {{"transfer", link_json(links.transfer_inside)},
          {"reduce", link_json(links.reduce_inside)},
          {"gather", link_json(links.gather_inside)}};
}
Link read_link(const Reader& reader) {
  return {reader.number("latency_us"), reader.number("us_per_byte")};
}
Links read_links(const Reader& reader, int64_t version) {
  const bool told_apart = version >= Profile::kMeasuredLinks;
  Links links;
  links.source = "the profile, by memory copies of one process";
  links.transfer_inside = read_link(reader.child(told_apart ? "transfer" : "transfer_inside"));
  links.reduce_inside = read_link(reader.child(told_apart ? "reduce" : "reduce_inside"));
  links.gather_inside = told_apart ? read_link(reader.child("gather")) : links.reduce_inside;
  links.transfer_between = links.transfer_inside;
  links.reduce_between = links.reduce_inside;
  links.gather_between = links.gather_inside;
  return links;
}

}  // namespace

std::string write_profile(const Profile& profile) {
  Json operations;
  for (int i = 0; i < kOperations; ++i)
    operations[operation_name(static_cast<Operation>(i))] =
        table_json(profile.tables[static_cast<size_t>(i)], profile.prefix_measured);
  const ModelShape& shape = profile.shape;
  Json json = {
      {"format", "sparsebalance-profile"},
      {"version", Profile::kVersion},
      {"name", profile.name},
      {"machine", profile.machine},
      {"date", profile.date},
      {"recompute", profile.recompute},
      {"model",
       {{"name", shape.name},
        {"layers", shape.layers},
        {"hidden", shape.hidden},
        {"heads", shape.heads},
        {"kv_heads", shape.kv_heads},
        {"head_dim", shape.head_dim},
        {"intermediate", shape.intermediate},
        {"vocabulary", shape.vocabulary}}},
      {"operations", operations},
      {"gpus_per_node", profile.links.node_ranks},
      {"peak_tflops", profile.peak_tflops},
      {"memory_bytes", profile.memory_bytes},
      {"held_out_error",
       {{"median", profile.held_out.median}, {"p95", profile.held_out.p95}, {"count", profile.held_out.count}}}};
  if (const auto& attention = profile.attention)
    json["attention"] = {{"block", attention->block},
                         {"query_block", attention->query_block},
                         {"pattern", attention->pattern},
                         {"score", attention->score},
                         {"score_channels", attention->score_channels},
                         {"score_tokens", attention->score_tokens}};
  if (profile.peak_tflops == 0 && profile.memory_bytes == 0) json["links"] = links_json(profile.links);
  if (profile.lora_rank > 0) json["lora_rank"] = profile.lora_rank;
  // A file's name need not be UTF-8, which JSON is.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

namespace {

Profile::Attention read_attention(const Reader& reader, bool tells_score) {
  Profile::Attention attention;
  attention.block = reader.integer("block");
  attention.query_block = reader.integer("query_block");
  attention.pattern = tells_score ? reader.text("pattern") : "topk";
  attention.score = tells_score ? reader.text("score") : "moments";
  if (tells_score) attention.score_channels = reader.integer("score_channels");
  attention.score_tokens = reader.integer("score_tokens");
  const auto& [block, query_block, pattern, score, channels, score_tokens] = attention;
  SB_USER_CHECK(block > 0 && query_block > 0, "{}: block and query_block must be positive", reader.where());
  SB_USER_CHECK(score_tokens == 0 || (score_tokens > 0 && block % score_tokens == 0),
                "{}.score_tokens: {} is neither 0 nor a divisor of block {}", reader.where(), score_tokens, block);
  SB_USER_CHECK(channels >= 0 && (channels > 0) == (score == "planes") && (channels == 0 || score_tokens == 0),
                "{}: score {} with {} channels and {} score tokens; only planes have channels, only the other scores "
                "have score tokens",
                reader.where(), score, channels, score_tokens);
  return attention;
}

}  // namespace

Profile parse_profile(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  SB_USER_CHECK(!json.is_discarded(), "{}: is not JSON", where);
  const Reader reader(json, where);
  SB_USER_CHECK(json.contains("format") && json["format"] == "sparsebalance-profile",
                "{}: is not a profile (`format` must be \"sparsebalance-profile\")", where);
  const int64_t version = reader.integer("version");
  SB_USER_CHECK(
      version >= Profile::kOldestVersion && version <= Profile::kVersion,
      "{}: has profile version {}, but this program reads versions {} to {}; run `sparsebalance profile` again", where,
      version, Profile::kOldestVersion, Profile::kVersion);
  Profile profile;
  profile.name = reader.text("name");
  profile.machine = reader.text("machine");
  profile.date = reader.text("date");
  profile.recompute = reader.text("recompute");
  if (reader.has("lora_rank")) profile.lora_rank = reader.integer("lora_rank");
  SB_USER_CHECK(profile.lora_rank >= 0 && profile.lora_rank <= 1 << 16, "{}.lora_rank: {} is not a valid rank", where,
                profile.lora_rank);
  if (json.contains("attention"))
    profile.attention = read_attention(reader.child("attention"), version >= Profile::kTellsScore);
  const Reader model = reader.child("model");
  profile.shape = {model.text("name"),
                   model.integer("layers"),
                   model.integer("hidden"),
                   model.integer("heads"),
                   model.integer("kv_heads"),
                   model.integer("head_dim"),
                   model.integer("intermediate"),
                   model.integer("vocabulary"),
                   false};
  check_model_shape(profile.shape, model.where());
  const Reader operations = reader.child("operations");
  // Files from before pieces were measured do not have it.
  profile.prefix_measured = operations.child(operation_name(Operation::attention_backward)).has("us_per_prefix");
  for (int i = 0; i < kOperations; ++i)
    profile.tables[static_cast<size_t>(i)] =
        read_table(operations.child(operation_name(static_cast<Operation>(i))), profile.prefix_measured);
  profile.peak_tflops = reader.number("peak_tflops");
  profile.memory_bytes = reader.count("memory_bytes", 0, kMostBytes);
  if (profile.peak_tflops == 0 && profile.memory_bytes == 0)
    profile.links = read_links(reader.child("links"), version);
  else
    profile.links = assumed_links(profile.machine.find("A100") != std::string::npos ? "a100" : "h100");
  profile.links.node_ranks = static_cast<int>(reader.count("gpus_per_node", 1, kMostGpus));
  // As many as the ranks: nothing is known of them.
  profile.links.adapters = profile.links.node_ranks;
  const Reader error = reader.child("held_out_error");
  profile.held_out = {error.number("median"), error.number("p95"), error.count("count", 0, INT64_MAX)};
  if (!profile.prefix_measured) assume_prefix(profile);
  return profile;
}

}  // namespace sb
