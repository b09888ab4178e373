#include "model/hf_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::vector<std::string> file_names(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// A model in evaluation, from the directory of a checkpoint.
struct Loaded {
  explicit Loaded(const fs::path& directory) : Loaded(directory, read_model_config(directory / "config.json")) {}
  Loaded(const fs::path& directory, const ModelConfig& config) : stage(config, options(config), attention, 2) {
    read_hf_weights(directory, stage.parameters());
  }
  static StageOptions options(const ModelConfig& config) {
    StageOptions result = whole_model(config, 300);
    result.training = false;
    return result;
  }
  std::vector<float> logits(const MicroBatch& batch) { return all_logits(stage, run.exec, batch); }

  TestExec run;
  NaiveAttention attention;
  Stage stage;
};

class HfCheckpointTest : public testing::TestWithParam<const char*> {
 protected:
  HfCheckpointTest() : fixture_(GetParam()), batch_(pack(fixture_.sequences, 1)), original_(fixture_.directory) {}

  void write(const HfWriteOptions& options) {
    write_hf_model(directory_.path(), original_.stage.config(), original_.stage.parameters(), options);
  }

  HfFixture fixture_;
  MicroBatch batch_;
  Loaded original_;
  TemporaryDirectory directory_;
};

TEST_P(HfCheckpointTest, WrittenAndReadAgainGivesTheSameLogits) {
  write({.copy_from = fixture_.directory});
  EXPECT_EQ(file_names(directory_.path()),
            (std::vector<std::string>{"config.json", "generation_config.json", "model.safetensors"}));
  Loaded again(directory_.path());
  EXPECT_EQ(hf_values(again.stage.parameters()), hf_values(original_.stage.parameters()));
  EXPECT_EQ(again.logits(batch_), original_.logits(batch_));
  EXPECT_EQ(read_file(directory_.path() / "generation_config.json"),
            read_file(fixture_.directory / "generation_config.json"));

  // The tensors are those of the file that transformers wrote: names, types, shapes and bytes.
  const SafetensorsFile ours(directory_.path() / "model.safetensors"), theirs(fixture_.directory / "model.safetensors");
  EXPECT_EQ(ours.header().entries.size(), theirs.header().entries.size());
  EXPECT_EQ(ours.header().metadata, theirs.header().metadata);
  for (const SafetensorsEntry& entry : theirs.header().entries) {
    const SafetensorsEntry* mine = ours.find(entry.name);
    ASSERT_NE(mine, nullptr) << entry.name;
    EXPECT_EQ(mine->dtype, entry.dtype);
    EXPECT_EQ(mine->shape, entry.shape);
    EXPECT_TRUE(std::ranges::equal(ours.data(*mine), theirs.data(entry))) << entry.name;
  }
}

TEST_P(HfCheckpointTest, Sharded) {
  write({.max_shard_bytes = 100'000});
  const auto index = Json::parse(read_file(directory_.path() / "model.safetensors.index.json"));
  std::set<std::string> shards;
  for (const auto& [name, file] : index["weight_map"].items()) shards.insert(file);
  EXPECT_GE(shards.size(), 5u);
  EXPECT_FALSE(fs::exists(directory_.path() / "model.safetensors"));
  int64_t total = 0;
  for (const std::string& shard : shards) {
    const SafetensorsFile file(directory_.path() / shard);
    const int64_t bytes = file.header().entries.back().end;
    EXPECT_LE(bytes, 100'000);
    total += bytes;
    for (const SafetensorsEntry& entry : file.header().entries) EXPECT_EQ(index["weight_map"][entry.name], shard);
  }
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(total, original_.stage.parameters().elements() * 4);
  const std::string count = fmt::format("{:05}", shards.size());
  EXPECT_EQ(*shards.begin(), "model-00001-of-" + count + ".safetensors");
  Loaded again(directory_.path());
  EXPECT_EQ(again.logits(batch_), original_.logits(batch_));
}

TEST_P(HfCheckpointTest, ATensorLargerThanAShardHasItsOwn) {
  write({.max_shard_bytes = 1});
  Loaded again(directory_.path());
  EXPECT_EQ(hf_values(again.stage.parameters()), hf_values(original_.stage.parameters()));
}

TEST_P(HfCheckpointTest, Bf16) {
  write({.dtype = DType::bf16});
  const auto config = Json::parse(read_file(directory_.path() / "config.json"));
  EXPECT_EQ(config["dtype"], "bfloat16");
  Loaded again(directory_.path());
  for (const auto& [name, values] : hf_values(original_.stage.parameters())) {
    const std::vector<float> rounded = hf_values(again.stage.parameters()).at(name);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(rounded[i], values[i], std::abs(values[i]) / 256) << name;  // half a step of 8 bits
    }
  }
  EXPECT_LT(relative_difference(again.logits(batch_), original_.logits(batch_)), 0.05);
}

TEST_P(HfCheckpointTest, APartOfTheLayersReadsItsPart) {
  StageOptions options = Loaded::options(original_.stage.config());
  options.first_layer = 1;
  NaiveAttention attention;
  Stage back(original_.stage.config(), options, attention, 1);
  read_hf_weights(fixture_.directory, back.parameters());
  const Tensors whole = hf_values(original_.stage.parameters()), part = hf_values(back.parameters());
  EXPECT_LT(part.size(), whole.size());
  for (const auto& [name, values] : part) EXPECT_EQ(values, whole.at(name)) << name;
  // Tied: the last stage has its own copy of the embedding. Untied: only the head.
  EXPECT_EQ(part.contains("model.embed_tokens.weight"), back.config().tie_word_embeddings);
}

TEST_P(HfCheckpointTest, AnotherModelInTheSameDirectoryIsReplaced) {
  write({.max_shard_bytes = 100'000});
  write({});
  EXPECT_EQ(file_names(directory_.path()), (std::vector<std::string>{"config.json", "model.safetensors"}));
  write({.max_shard_bytes = 300'000});
  EXPECT_FALSE(fs::exists(directory_.path() / "model.safetensors"));
  const size_t files = file_names(directory_.path()).size();
  write({.max_shard_bytes = 100'000});
  EXPECT_GT(file_names(directory_.path()).size(), files);
  Loaded again(directory_.path());
  EXPECT_EQ(hf_values(again.stage.parameters()), hf_values(original_.stage.parameters()));
}

// A write that fails half-way leaves the older model as it was, and no temporary files.
TEST_P(HfCheckpointTest, AFailedWriteLeavesTheOlderModel) {
  write({});
  const std::vector<std::string> before = file_names(directory_.path());
  const std::string weights = read_file(directory_.path() / "model.safetensors");
  // A directory in the place of a temporary file stops the writer after the weights are written.
  fs::create_directory(directory_.path() / "config.json.tmp");
  original_.stage.initialize(1);
  EXPECT_SAYS(user_error([&] { write({}); }), "config.json.tmp");
  fs::remove(directory_.path() / "config.json.tmp");
  EXPECT_EQ(file_names(directory_.path()), before);
  EXPECT_EQ(read_file(directory_.path() / "model.safetensors"), weights);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, HfCheckpointTest, testing::Values("qwen2_tied", "llama_untied"),
                         [](const auto& test) { return std::string(test.param); });

TEST(HfCompanionsTest, AreCopiedWhenThere) {
  TemporaryDirectory from, to;
  const std::vector<std::string> companions = {
      "added_tokens.json", "chat_template.jinja", "chat_template.json",      "generation_config.json", "merges.txt",
      "tokenizer.json",    "tokenizer.model",     "special_tokens_map.json", "tokenizer_config.json",  "vocab.json"};
  for (const std::string& name : companions) write_file(from.path() / name, "content of " + name);
  write_file(from.path() / "optimizer.pt", "not ours to copy");
  fs::permissions(from.path() / "merges.txt", fs::perms::owner_read);
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen3);
  NaiveAttention attention;
  Stage stage(config, Loaded::options(config), attention, 1);
  stage.initialize(3);
  for (int round = 0; round < 2; ++round) {
    write_hf_model(to.path(), config, stage.parameters(), {.copy_from = from.path()});
    for (const std::string& name : companions) EXPECT_EQ(read_file(to.path() / name), "content of " + name);
    EXPECT_EQ(file_names(to.path()).size(), companions.size() + 2);
  }
  // From and to the same directory: nothing to copy, nothing lost.
  write_hf_model(to.path(), config, stage.parameters(), {.copy_from = to.path() / "."});
  EXPECT_EQ(read_file(to.path() / "vocab.json"), "content of vocab.json");
  Loaded again(to.path());
  EXPECT_EQ(hf_values(again.stage.parameters()), hf_values(stage.parameters()));
}

// --- bad input

// A copy of a fixture with something broken in it.
class BadCheckpointTest : public testing::Test {
 protected:
  BadCheckpointTest() : config_(read_model_config(source() / "config.json")) {
    fs::copy_file(source() / "model.safetensors", path() / "model.safetensors");
    const SafetensorsFile file(source() / "model.safetensors");
    for (const SafetensorsEntry& entry : file.header().entries) {
      tensors_.push_back({entry.name, entry.shape, nullptr});
      auto& values = storage_.emplace_back(static_cast<size_t>(entry.elements()));
      file.read_f32(entry, values);
    }
  }
  static fs::path source() { return fs::path(SB_TEST_DATA) / "hf" / "llama_untied"; }
  const fs::path& path() const { return directory_.path(); }

  // The weights rewritten after a change to the list of tensors.
  void rewrite(const std::function<void(std::vector<SafetensorsTensor>&)>& change) {
    for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = storage_[i].data();
    change(tensors_);
    write_safetensors(path() / "model.safetensors", tensors_, DType::f32);
  }
  std::string complaint() {
    const std::string text = user_error([&] { Loaded loaded(path(), config_); });
    EXPECT_TRUE(text.starts_with(path().string())) << text;
    return text;
  }
  static SafetensorsTensor& find(std::vector<SafetensorsTensor>& tensors, const std::string& name) {
    return *std::ranges::find(tensors, name, &SafetensorsTensor::name);
  }

  TemporaryDirectory directory_;
  ModelConfig config_;
  std::vector<SafetensorsTensor> tensors_;
  std::vector<std::vector<float>> storage_;
};

TEST_F(BadCheckpointTest, TheCopyItselfIsFine) {
  EXPECT_NO_THROW(Loaded(path(), config_));
  rewrite([](auto&) {});
  EXPECT_NO_THROW(Loaded(path(), config_));
}

TEST_F(BadCheckpointTest, MissingTensor) {
  rewrite([](auto& tensors) {
    std::erase_if(tensors, [](const auto& t) { return t.name == "model.layers.1.self_attn.k_proj.weight"; });
  });
  EXPECT_SAYS(complaint(), "tensor 'model.layers.1.self_attn.k_proj.weight' is missing");
}

TEST_F(BadCheckpointTest, MissingHeadHintsAtTying) {
  rewrite([](auto& tensors) { std::erase_if(tensors, [](const auto& t) { return t.name == "lm_head.weight"; }); });
  const std::string text = complaint();
  EXPECT_SAYS(text, "tensor 'lm_head.weight' is missing");
  EXPECT_SAYS(text, "tie_word_embeddings");
}

TEST_F(BadCheckpointTest, WrongShape) {
  rewrite([](auto& tensors) { find(tensors, "model.layers.2.mlp.down_proj.weight").shape = {160, 64}; });
  EXPECT_SAYS(
      complaint(),
      "model.safetensors: tensor 'model.layers.2.mlp.down_proj.weight' has shape [160, 64], config.json requires "
      "[64, 160]");
  rewrite([](auto& tensors) { find(tensors, "model.norm.weight").shape = {64, 1}; });
  EXPECT_SAYS(complaint(), "has shape");
}

TEST_F(BadCheckpointTest, TensorsTheModelHasNoPlaceFor) {
  const std::vector<float> bias(64);
  rewrite([&](auto& tensors) { tensors.push_back({"model.layers.0.self_attn.o_proj.bias", {64}, bias.data()}); });
  EXPECT_SAYS(complaint(), "tensor 'model.layers.0.self_attn.o_proj.bias' has no place");
  for (const char* name : {"lm_head.bias", "model.embed_norm.weight"}) {
    rewrite([&](auto& tensors) { tensors.back() = {name, {64}, bias.data()}; });
    EXPECT_SAYS(complaint(), fmt::format("tensor '{}' has no place", name));
  }
}

TEST_F(BadCheckpointTest, WeightsThatAreNoNumbers) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> norm(64, 1.0f);
    norm[63] = value;
    rewrite([&](auto& tensors) { find(tensors, "model.norm.weight").data = norm.data(); });
    EXPECT_SAYS(complaint(), fmt::format("tensor 'model.norm.weight' holds {} at element 63", value));
  }
}

TEST_F(BadCheckpointTest, MoreLayersThanTheModelHas) {
  config_.layers -= 1;
  EXPECT_SAYS(complaint(), fmt::format("model.safetensors: tensor 'model.layers.{0}.", config_.layers));
  EXPECT_SAYS(complaint(), fmt::format("beyond the {} of config.json", config_.layers));
  // A stage that does not end the model leaves later layers to others.
  StageOptions first;
  first.last_layer = 1;
  first.max_micro_batch_tokens = first.max_sequence_length = 8;
  NaiveAttention attention;
  Stage stage(config_, first, attention, 1);
  EXPECT_NO_THROW(read_hf_weights(path(), stage.parameters()));
}

TEST_F(BadCheckpointTest, LeftoversThatChangeNothingArePassedOver) {
  const std::vector<float> values(64);
  rewrite([&](auto& tensors) {
    tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {8}, values.data()});
    tensors.push_back({"model.rotary_emb.inv_freq", {8}, values.data()});
    tensors.push_back({"vision.something", {64}, values.data()});
  });
  EXPECT_NO_THROW(Loaded(path(), config_));
}

TEST_F(BadCheckpointTest, WrongType) {
  // The same bytes declared as integers.
  std::string bytes = read_file(path() / "model.safetensors");
  bytes.replace(bytes.find("\"F32\""), 5, "\"I32\"");
  write_file(path() / "model.safetensors", bytes);
  EXPECT_SAYS(complaint(), "tensor 'lm_head.weight' has the type I32; weights must be F32, BF16 or F16");
}

TEST_F(BadCheckpointTest, Truncated) {
  fs::resize_file(path() / "model.safetensors", 600'000);
  EXPECT_SAYS(complaint(), "model.safetensors: cut short");
}

TEST_F(BadCheckpointTest, NothingThere) {
  fs::remove(path() / "model.safetensors");
  EXPECT_SAYS(complaint(), "neither model.safetensors nor model.safetensors.index.json");
  write_file(path() / "pytorch_model.bin", "pickle");
  EXPECT_SAYS(complaint(), "save the model as safetensors");
  ParameterSet none;
  EXPECT_SAYS(user_error([&] { read_hf_weights(path() / "missing", none); }), "missing: no such directory");
  EXPECT_SAYS(user_error([&] { write_hf_model(path() / "missing", config_, none, {}); }), "missing: no such directory");
}

class BadIndexTest : public BadCheckpointTest {
 protected:
  BadIndexTest() {
    Loaded loaded(path(), config_);
    write_hf_model(path(), config_, loaded.stage.parameters(), {.max_shard_bytes = 300'000});
    index_ = Json::parse(read_file(path() / kIndex));
  }
  void write_index(const std::string& text) { write_file(path() / kIndex, text); }
  static constexpr const char* kIndex = "model.safetensors.index.json";
  Json index_;
};

TEST_F(BadIndexTest, NotAnIndex) {
  EXPECT_NO_THROW(Loaded(path(), config_));
  write_index("{");
  EXPECT_SAYS(complaint(), "model.safetensors.index.json: not valid JSON");
  write_index("{}");
  EXPECT_SAYS(complaint(), "no weight_map");
  write_index("[]");
  EXPECT_SAYS(complaint(), "no weight_map");
  write_index(R"({"weight_map": []})");
  EXPECT_SAYS(complaint(), "no weight_map");
  write_index(std::string(100'000, '['));
  EXPECT_SAYS(complaint(), "nested too deep");
}

TEST_F(BadIndexTest, PointsElsewhere) {
  for (const Json& target :
       {Json("../model.safetensors"), Json("/etc/passwd"), Json("model.bin"), Json(3), Json(nullptr)}) {
    Json changed = index_;
    changed["weight_map"]["model.norm.weight"] = target;
    write_index(changed.dump());
    EXPECT_SAYS(complaint(), "tensor 'model.norm.weight' must name a .safetensors file next to the index");
  }
  Json changed = index_;
  changed["weight_map"]["model.norm.weight"] = "model-00009-of-00009.safetensors";
  write_index(changed.dump());
  EXPECT_SAYS(complaint(), "model-00009-of-00009.safetensors: cannot be opened");
  changed["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors";
  write_index(changed.dump());
  EXPECT_SAYS(complaint(), "tensor 'model.norm.weight' is not there, though the index says so");
  changed["weight_map"].erase("model.norm.weight");
  write_index(changed.dump());
  EXPECT_SAYS(complaint(), "tensor 'model.norm.weight' is missing");
}

TEST_F(BadIndexTest, DamagedShard) {
  fs::resize_file(path() / "model-00002-of-00003.safetensors", 1000);
  EXPECT_SAYS(complaint(), "model-00002-of-00003.safetensors");
}

}  // namespace
}  // namespace sb::test
