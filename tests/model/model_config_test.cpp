#include "model/model_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

using nlohmann::ordered_json;
using Type = RopeConfig::Type;

ordered_json minimal(const std::string& model_type = "qwen2") {
  return {{"model_type", model_type}, {"vocab_size", 100},        {"hidden_size", 32},   {"intermediate_size", 48},
          {"num_hidden_layers", 3},   {"num_attention_heads", 4}, {"rope_theta", 5000.0}};
}

ordered_json with(ordered_json json, const ordered_json& changes) {
  json.update(changes);
  return json;
}

ModelConfig parse(const ordered_json& json) {
  return parse_model_config(json.dump(), "config.json");
}

std::string complaint(const ordered_json& json) {
  const std::string text = user_error([&] { parse(json); });
  EXPECT_TRUE(text.starts_with("config.json")) << text;
  return text;
}

TEST(ModelConfigTest, ReadsBothSpellingsAlike) {
  for (const char* fixture : {"qwen2_tied", "llama_untied"}) {
    const auto directory = std::filesystem::path(SB_TEST_DATA) / "hf" / fixture;
    ModelConfig a = read_model_config(directory / "config.json"), b = read_model_config(directory / "config.v4.json");
    EXPECT_EQ(a.rope, b.rope);
    EXPECT_EQ(a.vocab_size, 320);
    EXPECT_EQ(a.hidden_size, 64);
    EXPECT_EQ(a.intermediate_size, 160);
    EXPECT_EQ(a.layers, 3);
    EXPECT_EQ(a.heads, 4);
    EXPECT_EQ(a.kv_heads, 2);
    EXPECT_EQ(a.head_dim, 16);
    EXPECT_EQ(a.group(), 2);
    EXPECT_EQ(a.rms_norm_eps, 1e-6f);
    EXPECT_EQ(a.max_position_embeddings, 4096);
  }
  const auto hf = std::filesystem::path(SB_TEST_DATA) / "hf";
  const ModelConfig qwen2 = read_model_config(hf / "qwen2_tied" / "config.json");
  EXPECT_TRUE(qwen2.tie_word_embeddings && qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm);
  EXPECT_EQ(qwen2.rope, (RopeConfig{.theta = 1e6}));
  const ModelConfig llama = read_model_config(hf / "llama_untied" / "config.v4.json");
  EXPECT_TRUE(!llama.tie_word_embeddings && !llama.qkv_bias && !llama.output_bias && !llama.qk_norm);
  EXPECT_EQ(llama.rope.type, Type::llama3);
  EXPECT_EQ(llama.rope.theta, 500000);
  EXPECT_EQ(llama.rope.factor, 8);
  EXPECT_EQ(llama.rope.original_max_position_embeddings, 64);
  EXPECT_EQ(llama.eos_token_ids, (std::vector<int32_t>{2}));
}

TEST(ModelConfigTest, DefaultsOfWhatOldFilesLeaveOut) {
  const ModelConfig config = parse(minimal("llama"));
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rms_norm_eps, 1e-6f);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_TRUE(config.eos_token_ids.empty());
  EXPECT_EQ(parse(with(minimal("llama"), {{"rope_theta", nullptr}})).rope.theta, 10000);
  EXPECT_EQ(parse(minimal("qwen3")).head_dim, 128);
  EXPECT_EQ(parse(with(minimal("qwen3"), {{"head_dim", 16}})).head_dim, 16);
}

TEST(ModelConfigTest, Families) {
  const ModelConfig llama = parse(with(minimal("llama"), {{"attention_bias", true}}));
  EXPECT_TRUE(llama.qkv_bias && llama.output_bias && !llama.qk_norm);
  const ModelConfig qwen3 = parse(minimal("qwen3"));
  EXPECT_TRUE(qwen3.qk_norm && !qwen3.qkv_bias && !qwen3.output_bias);
  EXPECT_EQ(parse(with(minimal(), {{"eos_token_id", {3, 7}}})).eos_token_ids, (std::vector<int32_t>{3, 7}));
  EXPECT_NO_THROW(parse(with(minimal("qwen3"), {{"architectures", {"Qwen3ForCausalLM"}}})));
}

TEST(ModelConfigTest, RopeTypesUnderEitherKey) {
  for (const char* key : {"type", "rope_type"}) {
    const ModelConfig linear = parse(with(minimal(), {{"rope_scaling", {{key, "linear"}, {"factor", 2}}}}));
    EXPECT_EQ(linear.rope, (RopeConfig{.type = Type::linear, .theta = 5000, .factor = 2}));
    const ModelConfig yarn = parse(with(
        minimal(), {{"rope_scaling", {{key, "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}}}}));
    EXPECT_EQ(yarn.rope,
              (RopeConfig{.type = Type::yarn, .theta = 5000, .factor = 4, .original_max_position_embeddings = 32768}));
  }
  const ModelConfig full = parse(with(minimal(), {{"max_position_embeddings", 99},
                                                  {"rope_parameters",
                                                   {{"rope_type", "yarn"},
                                                    {"rope_theta", 7e5},
                                                    {"factor", 3},
                                                    {"beta_fast", 30},
                                                    {"beta_slow", 2},
                                                    {"attention_factor", 1.5},
                                                    {"mscale", 0.7},
                                                    {"mscale_all_dim", 0.8},
                                                    {"truncate", false}}}}));
  EXPECT_EQ(full.rope, (RopeConfig{.type = Type::yarn,
                                   .theta = 7e5,
                                   .factor = 3,
                                   .original_max_position_embeddings = 99,
                                   .beta_fast = 30,
                                   .beta_slow = 2,
                                   .attention_factor = 1.5,
                                   .mscale = 0.7,
                                   .mscale_all_dim = 0.8,
                                   .truncate = false}));
  // rope_theta beside rope_parameters counts when they have none.
  EXPECT_EQ(parse(with(minimal(), {{"rope_parameters", {{"rope_type", "default"}}}})).rope.theta, 5000);
}

TEST(ModelConfigTest, RefusesWhatItDoesNotSupportByName) {
  EXPECT_SAYS(complaint(minimal("mixtral")),
              "model_type 'mixtral' is not supported; supported are qwen2, llama, qwen3");
  EXPECT_SAYS(complaint(with(minimal(), {{"architectures", {"Qwen2ForTokenClassification"}}})),
              "architecture 'Qwen2ForTokenClassification'");
  EXPECT_SAYS(complaint(with(minimal(), {{"architectures", {"LlamaForCausalLM"}}})), "Qwen2ForCausalLM");
  EXPECT_SAYS(complaint(with(minimal(), {{"hidden_act", "gelu"}})), "hidden_act 'gelu'");
  EXPECT_SAYS(complaint(with(minimal(), {{"quantization_config", {{"bits", 4}}}})), "quantization_config");
  EXPECT_SAYS(complaint(with(minimal("llama"), {{"mlp_bias", true}})), "mlp_bias");
  EXPECT_SAYS(complaint(with(minimal(), {{"partial_rotary_factor", 0.5}})), "partial_rotary_factor");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}})),
              "rope type 'dynamic' is not supported; supported are default, linear, llama3, yarn");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_parameters", {{"rope_type", "longrope"}}}})), "'longrope'");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}})),
              "by layer type");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_parameters", {{"rope_type", "default"}}},
                                         {"rope_scaling", {{"type", "linear"}, {"factor", 2}}}})),
              "both there");
}

TEST(ModelConfigTest, SlidingWindowsAreRefusedWhenTheyAct) {
  const ordered_json window = {{"use_sliding_window", true}, {"sliding_window", 4096}};
  EXPECT_SAYS(complaint(with(with(minimal(), window), {{"max_window_layers", 2}})), "use_sliding_window");
  EXPECT_NO_THROW(parse(with(with(minimal(), window), {{"max_window_layers", 3}})));
  EXPECT_SAYS(complaint(with(minimal(), {{"use_sliding_window", true}, {"max_window_layers", 2}})),
              "sliding_window 4096 on the layers from 2");
  EXPECT_NO_THROW(
      parse(with(minimal(), {{"use_sliding_window", false}, {"sliding_window", 4096}, {"max_window_layers", 0}})));
  EXPECT_NO_THROW(
      parse(with(minimal(), {{"use_sliding_window", true}, {"sliding_window", nullptr}, {"max_window_layers", 0}})));
  EXPECT_SAYS(complaint(with(minimal(), {{"layer_types", {"full_attention", "sliding_attention", "full_attention"}}})),
              "sliding_attention");
  EXPECT_SAYS(complaint(with(minimal(), {{"layer_types", {"full_attention"}}})), "3 layers");
}

TEST(ModelConfigTest, NamesTheKeyThatIsWrong) {
  for (const char* key :
       {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}) {
    ordered_json json = minimal();
    json.erase(key);
    EXPECT_SAYS(complaint(json), std::string(key) + " is missing");
    json[key] = nullptr;
    EXPECT_SAYS(complaint(json), std::string(key) + " is missing");
    json[key] = {1};
    EXPECT_SAYS(complaint(json), key);
    if (std::string(key) == "model_type") continue;
    for (const ordered_json& bad : {ordered_json(-3), ordered_json(2.5), ordered_json("3"), ordered_json(0)}) {
      json[key] = bad;
      EXPECT_SAYS(complaint(json), key);
    }
    json[key] = 1e30;
    EXPECT_SAYS(complaint(json), key);
    json[key] = INT64_MAX;
    EXPECT_SAYS(complaint(json), key);
    json[key] = UINT64_MAX;
    EXPECT_SAYS(complaint(json), key);
  }
  EXPECT_SAYS(complaint(with(minimal(), {{"num_key_value_heads", 3}})), "multiple of num_key_value_heads 3");
  EXPECT_SAYS(complaint(with(minimal(), {{"num_key_value_heads", 0}})), "num_key_value_heads");
  EXPECT_SAYS(complaint(with(minimal(), {{"head_dim", 7}})), "head_dim must be even");
  EXPECT_SAYS(complaint(with(minimal(), {{"head_dim", 2000000000}})), "width of q, k and v");
  EXPECT_SAYS(complaint(with(minimal(), {{"rms_norm_eps", 0.0}})), "rms_norm_eps");
  EXPECT_SAYS(complaint(with(minimal(), {{"rms_norm_eps", "small"}})), "rms_norm_eps must be a number");
  EXPECT_SAYS(complaint(with(minimal(), {{"initializer_range", -1}})), "initializer_range");
  EXPECT_SAYS(complaint(with(minimal(), {{"tie_word_embeddings", 1}})), "tie_word_embeddings must be true or false");
  EXPECT_SAYS(complaint(with(minimal(), {{"eos_token_id", "</s>"}})), "eos_token_id");
  EXPECT_SAYS(complaint(with(minimal(), {{"eos_token_id", {1, -2}}})), "eos_token_id");
  EXPECT_SAYS(complaint(with(minimal(), {{"architectures", "Qwen2ForCausalLM"}})), "architectures");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_theta", 0}})), "rope_theta");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_theta", 1}})), "rope_theta must be above 1");
  EXPECT_SAYS(complaint(with(minimal(), {{"rope_scaling", 3}})), "rope_scaling must be an object");
}

TEST(ModelConfigTest, PositionsThatAreNotSaidAreThoseOfTransformers) {
  for (const auto& [type, positions] : {std::pair{"qwen2", 32768}, {"qwen3", 32768}, {"llama", 2048}}) {
    const ModelConfig config =
        parse(with(minimal(), {{"model_type", type}, {"rope_scaling", {{"type", "yarn"}, {"factor", 2}}}}));
    EXPECT_EQ(config.max_position_embeddings, positions) << type;
    EXPECT_EQ(config.rope.original_max_position_embeddings, positions) << type;
  }
  EXPECT_SAYS(complaint(with(minimal(), {{"max_position_embeddings", 0}})), "max_position_embeddings must be positive");
}

TEST(ModelConfigTest, NamesTheRopeKeyThatIsWrong) {
  const auto rope = [](const ordered_json& scaling) { return complaint(with(minimal(), {{"rope_scaling", scaling}})); };
  EXPECT_SAYS(rope({{"type", "linear"}}), "rope_scaling: factor is missing");
  EXPECT_SAYS(rope({{"type", 4}}), "type must be a string");
  EXPECT_SAYS(rope({{"type", "linear"}, {"factor", 0.5}}), "factor must be at least 1");
  EXPECT_SAYS(rope({{"type", "linear"}, {"factor", "2"}}), "factor must be a number");
  const ordered_json llama3 = {{"rope_type", "llama3"},
                               {"factor", 8},
                               {"low_freq_factor", 1},
                               {"high_freq_factor", 4},
                               {"original_max_position_embeddings", 64}};
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    ordered_json missing = llama3;
    missing.erase(key);
    EXPECT_SAYS(rope(missing), std::string(key) + " is missing");
  }
  EXPECT_SAYS(rope(with(llama3, {{"high_freq_factor", 1}})), "high_freq_factor 1 must be above");
  EXPECT_SAYS(rope(with(llama3, {{"low_freq_factor", -1}})), "low_freq_factor");
  EXPECT_SAYS(rope({{"type", "yarn"}, {"factor", 2}, {"original_max_position_embeddings", 8}, {"beta_fast", 0.5}}),
              "beta_fast");
  EXPECT_SAYS(rope({{"type", "yarn"}, {"factor", 2}, {"original_max_position_embeddings", 8}, {"beta_slow", 0}}),
              "beta_slow");
  EXPECT_SAYS(
      rope({{"type", "yarn"}, {"factor", 2}, {"original_max_position_embeddings", 8}, {"attention_factor", -1}}),
      "attention_factor");
}

TEST(ModelConfigTest, RefusesWhatIsNotAConfig) {
  const auto text = [](const std::string& json) {
    return user_error([&] { parse_model_config(json, "config.json"); });
  };
  EXPECT_SAYS(text(""), "config.json: not valid JSON");
  EXPECT_SAYS(text("{\"a\": "), "not valid JSON");
  EXPECT_SAYS(text("[1]"), "not a JSON object");
  EXPECT_SAYS(text(std::string(1'000'000, '[')), "nested deeper");
  EXPECT_SAYS(text(R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8,
                       "num_attention_heads": 2, "num_hidden_layers": 1000000})"),
              "num_hidden_layers is 1000000; at most 4096 work");
  const std::string missing = user_error([] { read_model_config("/nowhere/config.json"); });
  EXPECT_SAYS(missing, "/nowhere/config.json: not there");
}

// --- writing

TEST(ModelConfigTest, WritingChangesNothingThatDidNotChange) {
  for (const char* fixture : {"qwen2_tied", "llama_untied"}) {
    for (const char* file : {"config.json", "config.v4.json"}) {
      const auto path = std::filesystem::path(SB_TEST_DATA) / "hf" / fixture / file;
      const ModelConfig config = read_model_config(path);
      EXPECT_EQ(ordered_json::parse(write_model_config(config, "float32")).dump(),
                ordered_json::parse(read_file(path)).dump());
    }
  }
}

TEST(ModelConfigTest, WritingKeepsUnknownKeysAndTheSpellingOfTheType) {
  const ordered_json source =
      with(minimal(), {{"something_new", {{"a", 1}}}, {"torch_dtype", "float16"}, {"rms_norm_eps", 1e-05}});
  const ordered_json written = ordered_json::parse(write_model_config(parse(source), "bfloat16"));
  EXPECT_EQ(written["something_new"], source["something_new"]);
  EXPECT_EQ(written["torch_dtype"], "bfloat16");
  EXPECT_FALSE(written.contains("dtype"));
  EXPECT_EQ(written["rms_norm_eps"].dump(), "1e-05");
  const ordered_json newer =
      with(minimal(), {{"dtype", "float16"}, {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 3}}}});
  EXPECT_EQ(ordered_json::parse(write_model_config(parse(newer), "float32"))["dtype"], "float32");
  EXPECT_FALSE(ordered_json::parse(write_model_config(parse(newer), "float32")).contains("torch_dtype"));
}

TEST(ModelConfigTest, ANewRopeIsWrittenInTheSpellingOfTheSource) {
  const RopeConfig yarn{.type = Type::yarn, .theta = 1e6, .factor = 16, .original_max_position_embeddings = 4096};
  for (const char* file : {"config.json", "config.v4.json"}) {
    ModelConfig config = read_model_config(std::filesystem::path(SB_TEST_DATA) / "hf" / "qwen2_tied" / file);
    config.rope = yarn;
    config.max_position_embeddings = 65536;
    const std::string text = write_model_config(config, "float32");
    const ModelConfig again = parse_model_config(text, "config.json");
    EXPECT_EQ(again.rope, yarn);
    EXPECT_EQ(again.max_position_embeddings, 65536);
    EXPECT_EQ(ordered_json::parse(text).contains("rope_parameters"), std::string(file) == "config.json");
    EXPECT_EQ(ordered_json::parse(text).contains("rope_scaling"), std::string(file) != "config.json");
  }
  // "type" stays "type".
  ModelConfig old = parse(with(minimal(), {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}));
  old.rope.factor = 3;
  const ordered_json written = ordered_json::parse(write_model_config(old, "float32"));
  EXPECT_EQ(written["rope_scaling"], (ordered_json{{"type", "linear"}, {"factor", 3.0}}));
  old.rope = {};
  EXPECT_TRUE(ordered_json::parse(write_model_config(old, "float32"))["rope_scaling"].is_null());
}

TEST(ModelConfigTest, YarnKeepsItsOriginalLengthWhenTheLongestSequenceChanges) {
  ModelConfig config = parse(
      with(minimal(), {{"max_position_embeddings", 4096}, {"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}}));
  EXPECT_EQ(longest_sequence(config), 16384);
  config.max_position_embeddings = 16384;
  const ModelConfig again = parse_model_config(write_model_config(config, "float32"), "config.json");
  EXPECT_EQ(again.max_position_embeddings, 16384);
  EXPECT_EQ(again.rope, config.rope);
  EXPECT_EQ(again.rope.original_max_position_embeddings, 4096);
}

class WriteFromScratchTest : public testing::TestWithParam<ModelConfig::Family> {};

TEST_P(WriteFromScratchTest, ReadsBackTheSame) {
  ModelConfig config = tiny_config(GetParam());
  config.rms_norm_eps = 1e-5f;
  config.tie_word_embeddings = true;
  for (const RopeConfig& rope : {RopeConfig{.theta = 12345}, RopeConfig{.type = Type::linear, .factor = 2.5},
                                 RopeConfig{.type = Type::llama3,
                                 .factor = 8,
                                 .original_max_position_embeddings = 64,
                                 .low_freq_factor = 2,
                                 .high_freq_factor = 5},
                                 RopeConfig{.type = Type::yarn,
                                 .factor = 8,
                                 .original_max_position_embeddings = 64,
                                 .beta_fast = 20,
                                 .beta_slow = 3,
                                 .attention_factor = 1.25,
                                 .mscale = 0.5,
                                 .mscale_all_dim = 0.75,
                                 .truncate = false}}) {
    for (const std::vector<int32_t>& eos : {std::vector<int32_t>{}, {5}, {5, 6}}) {
      config.rope = rope;
      config.eos_token_ids = eos;
      const std::string text = write_model_config(config, "bfloat16");
      const ModelConfig again = parse_model_config(text, "config.json");
      EXPECT_EQ(again.family, config.family);
      EXPECT_EQ(again.vocab_size, config.vocab_size);
      EXPECT_EQ(again.hidden_size, config.hidden_size);
      EXPECT_EQ(again.intermediate_size, config.intermediate_size);
      EXPECT_EQ(again.layers, config.layers);
      EXPECT_EQ(again.heads, config.heads);
      EXPECT_EQ(again.kv_heads, config.kv_heads);
      EXPECT_EQ(again.head_dim, config.head_dim);
      EXPECT_EQ(again.rms_norm_eps, config.rms_norm_eps);
      EXPECT_EQ(again.initializer_range, config.initializer_range);
      EXPECT_EQ(again.rope, config.rope);
      EXPECT_EQ(again.max_position_embeddings, config.max_position_embeddings);
      EXPECT_EQ(again.tie_word_embeddings, config.tie_word_embeddings);
      EXPECT_EQ(again.qkv_bias, config.qkv_bias);
      EXPECT_EQ(again.output_bias, config.output_bias);
      EXPECT_EQ(again.qk_norm, config.qk_norm);
      EXPECT_EQ(again.eos_token_ids, config.eos_token_ids);
      EXPECT_EQ(ordered_json::parse(text)["torch_dtype"], "bfloat16");
      EXPECT_EQ(ordered_json::parse(text)["rms_norm_eps"].dump(), "1e-05");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, WriteFromScratchTest,
                         testing::Values(ModelConfig::Family::qwen2, ModelConfig::Family::llama,
                                         ModelConfig::Family::qwen3));

}  // namespace
}  // namespace sb::test
