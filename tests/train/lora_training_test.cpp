// Training adapters, from run.yaml to the files that come of it.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/random.h"
#include "model/adapter/merge.h"
#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"
#include "tests/model/model_fixture.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using test::Tensors;

Tensors tensors_of(const fs::path& file) {
  const SafetensorsFile read(file);
  Tensors tensors;
  for (const SafetensorsEntry& entry : read.header().entries) {
    std::vector<float>& values = tensors[entry.name];
    values.resize(static_cast<size_t>(entry.elements()));
    read.read_f32(entry, values);
  }
  return tensors;
}

nlohmann::json json_of(const fs::path& file) {
  std::ifstream in(file);
  return nlohmann::json::parse(in);
}

// The file with one number of one tensor multiplied.
void multiply(const fs::path& file, const std::string& tensor, size_t element, float factor) {
  Tensors tensors = tensors_of(file);
  tensors.at(tensor)[element] *= factor;
  const fs::path other = file.string() + ".other";
  {
    const SafetensorsFile shapes(file);
    std::vector<SafetensorsTensor> changed;
    for (const auto& [name, values] : tensors) changed.push_back({name, shapes.find(name)->shape, values.data()});
    write_safetensors(other, changed, DType::f32);
  }
  fs::rename(other, file);
}

class LoraTraining : public testing::Test {
 protected:
  LoraTraining() {
    TinyTrainer trainer(tiny_run(scratch / "base", {"train.max_steps=2", "train.save_steps=0"}));
    base = trainer->run().final_model;
  }

  RunConfig config(const std::string& name, std::vector<std::string> overrides = {}) const {
    overrides.insert(overrides.begin(),
                     {"model={path: " + base.string() + "}", "model.init=null",
                      "lora={rank: 4, alpha: 8, dropout: 0.1}", "train.max_steps=6", "train.save_steps=3"});
    return tiny_run(scratch / name, overrides);
  }
  TrainSummary train(const std::string& name, const std::vector<std::string>& overrides = {}) const {
    TinyTrainer trainer(config(name, overrides));
    return trainer->run();
  }
  Tensors adapter_of(const std::string& name) const { return tensors_of(scratch / name / "final" / kAdapterFile); }
  std::string refusal(const std::string& name, const std::vector<std::string>& overrides) const {
    return user_error_of([&] { run_training(config(name, overrides), stdout_, false, [] { return false; }, {}); });
  }

  ScratchDirectory scratch;
  fs::path base;
  std::FILE* stdout_ = std::fopen("/dev/null", "w");
};

TEST_F(LoraTraining, LearnsAndWritesWhatPeftReads) {
  const TrainSummary summary = train("run", {"train.max_steps=40"});
  ASSERT_TRUE(summary.first_validation && summary.last_validation);
  EXPECT_LT(summary.last_validation->loss, summary.first_validation->loss - 0.05);
  const nlohmann::json written = json_of(scratch / "run/final/adapter_config.json");
  EXPECT_EQ(written["peft_type"], "LORA");
  EXPECT_EQ(written["r"], 4);
  EXPECT_EQ(written["lora_alpha"], 8);
  EXPECT_EQ(written["base_model_name_or_path"], base.string());
  EXPECT_EQ(written["target_modules"].size(), 7u);
  EXPECT_TRUE(written["modules_to_save"].is_null());
  const Tensors tensors = adapter_of("run");
  EXPECT_EQ(tensors.size(), 2u * 7 * 2);
  EXPECT_EQ(tensors.at("base_model.model.model.layers.1.mlp.down_proj.lora_A.weight").size(), 4u * 48);
  EXPECT_EQ(tensors.at("base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight").size(), 16u * 4);
  EXPECT_FALSE(fs::exists(scratch / "run/merged"));
}

TEST_F(LoraTraining, AResumedRunHasTheBitsOfAnUndisturbedOne) {
  train("whole");
  train("stopped", {"train.max_steps=3"});
  train("stopped");
  EXPECT_EQ(adapter_of("stopped"), adapter_of("whole"));
  EXPECT_EQ(tensors_of(scratch / "stopped/checkpoint-6/optimizer.safetensors"),
            tensors_of(scratch / "whole/checkpoint-6/optimizer.safetensors"));
}

TEST_F(LoraTraining, AnotherBaseIsRefusedOnResume) {
  train("run", {"train.max_steps=3"});
  // One bit of one frozen tensor.
  multiply(base / "model.safetensors", "model.layers.1.mlp.up_proj.weight", 5, 1.0000001f);
  const std::string error = user_error_of([&] { train("run"); });
  EXPECT_NE(error.find("were trained on a different model"), std::string::npos) << error;
  EXPECT_NE(error.find("checkpoint-3"), std::string::npos) << error;
}

TEST_F(LoraTraining, MergedIsBasePlusScaledProduct) {
  train("run", {"lora.merged=true"});
  const Tensors adapter = adapter_of("run"), before = tensors_of(base / "model.safetensors"),
                after = tensors_of(scratch / "run/merged/model.safetensors");
  ASSERT_EQ(after.size(), before.size());
  for (const auto& [name, values] : before) {
    const std::string module = "base_model.model." + name.substr(0, name.rfind('.'));
    const auto a = adapter.find(module + ".lora_A.weight");
    if (a == adapter.end() || name.ends_with(".bias")) {
      EXPECT_EQ(after.at(name), values) << name;
      continue;
    }
    const std::vector<float>& b = adapter.at(module + ".lora_B.weight");
    const size_t in = a->second.size() / 4, out = b.size() / 4;
    std::vector<float> expected = values;
    for (size_t o = 0; o < out; ++o)
      for (size_t i = 0; i < in; ++i) {
        double sum = 0;
        for (size_t r = 0; r < 4; ++r) sum += double{b[o * 4 + r]} * a->second[r * in + i];
        expected[o * in + i] = static_cast<float>(values[o * in + i] + 2.0 * sum);
      }
    EXPECT_LT(test::relative_difference(after.at(name), expected), 1e-6) << name;
    EXPECT_GT(test::relative_difference(after.at(name), values), 1e-5) << name;
  }
}

TEST_F(LoraTraining, TrainedPartsAreInTheAdapterAndInMerged) {
  const TrainSummary summary = train("run", {"lora.train=[norms, embedding]"});
  EXPECT_EQ(summary.merged, scratch / "run/merged");
  const Tensors adapter = adapter_of("run"), merged = tensors_of(scratch / "run/merged/model.safetensors");
  for (const char* name : {"model.norm.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}) {
    EXPECT_EQ(merged.at(name), adapter.at(std::string("base_model.model.") + name)) << name;
    EXPECT_NE(merged.at(name), tensors_of(base / "model.safetensors").at(name)) << name;
  }
  // PEFT has a tensor of its own for the tied head.
  EXPECT_EQ(adapter.at("base_model.model.lm_head.weight"), adapter.at("base_model.model.model.embed_tokens.weight"));
  const nlohmann::json written = json_of(scratch / "run/final/adapter_config.json");
  EXPECT_EQ(written["modules_to_save"],
            nlohmann::json({"input_layernorm", "post_attention_layernorm", "norm", "embed_tokens", "lm_head"}));
  // And it can be gone on from.
  train("more", {"lora.train=[norms, embedding]", "lora.adapter=" + (scratch / "run/final").string()});
}

TEST_F(LoraTraining, AnAdapterWhoseWeightsAreNoNumbersIsRefused) {
  const fs::path adapter = train("first").final_model;
  const std::string name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
  multiply(adapter / "adapter_model.safetensors", name, 2, std::numeric_limits<float>::quiet_NaN());
  const std::string error = refusal("second", {"lora.adapter=" + adapter.string()});
  EXPECT_NE(error.find(fmt::format("tensor '{}' holds nan at element 2", name)), std::string::npos) << error;
}

TEST_F(LoraTraining, GoesOnFromAnAdapter) {
  const TrainSummary first = train("first", {"train.max_steps=30"});
  const std::string adapter = "lora.adapter=" + first.final_model.string();
  const TrainSummary second = train("second", {adapter, "train.max_steps=1"});
  EXPECT_EQ(second.first_validation->loss, first.last_validation->loss);
  // A run that resumes does not need it any more.
  const fs::path moved = scratch / "moved";
  fs::rename(first.final_model, moved);
  EXPECT_EQ(refusal("second", {adapter, "train.max_steps=2"}), "");
  fs::rename(moved, first.final_model);
  // What does not agree with it is named.
  const auto says = [&](const std::string& part, const std::vector<std::string>& overrides) {
    std::vector<std::string> all = overrides;
    all.insert(all.begin(), adapter);
    const std::string error = refusal("refused", all);
    EXPECT_NE(error.find(part), std::string::npos) << error;
    EXPECT_FALSE(fs::exists(scratch / "refused"));
  };
  says("lora.rank: 3, but the adapter in", {"lora.rank=3"});
  says("lora.alpha: 5, but", {"lora.alpha=5"});
  says("lora.targets: [q_proj], but", {"lora.targets=[q_proj]"});
  says("lora.train: [norms], but", {"lora.train=[norms]"});
  says("lora.rslora: true, but", {"lora.rslora=true"});
}

TEST_F(LoraTraining, BadAdaptersAreRefusedByName) {
  train("run", {"train.max_steps=1"});
  const fs::path good = scratch / "run/final", bad = scratch / "bad";
  const auto says = [&](const std::string& part, const std::function<void(nlohmann::json&)>& change) {
    fs::remove_all(bad);
    fs::copy(good, bad, fs::copy_options::recursive);
    nlohmann::json config = json_of(good / "adapter_config.json");
    change(config);
    std::ofstream(bad / "adapter_config.json") << config.dump();
    const std::string error = refusal("refused", {"lora.adapter=" + bad.string()});
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  says("use_dora: true: DoRA is not supported", [](auto& c) { c["use_dora"] = true; });
  says("r: 0: the rank must be", [](auto& c) { c["r"] = 0; });
  says("peft_type: \"IA3\"", [](auto& c) { c["peft_type"] = "IA3"; });
  says("frobnicate: 3: a field that this version does not know", [](auto& c) { c["frobnicate"] = 3; });
  says("modules_to_save: 'score' cannot be honoured", [](auto& c) { c["modules_to_save"] = {"score"}; });
  says("some norms but not 'post_attention_layernorm'", [](auto& c) { c["modules_to_save"] = {"input_layernorm"}; });
  says("'fc1' is none of q_proj", [](auto& c) { c["target_modules"] = {"fc1"}; });
  says("patterns are not read", [](auto& c) { c["target_modules"] = ".*_proj"; });
  says("rank_pattern: object: all modules", [](auto& c) { c["rank_pattern"] = {{"q_proj", 8}}; });
  says("init_lora_weights: \"pissa\"", [](auto& c) { c["init_lora_weights"] = "pissa"; });
  says("bias: \"all\": trained biases", [](auto& c) { c["bias"] = "all"; });
  says("has shape [4, 48], this model and rank need [8, 48]", [](auto& c) { c["r"] = 8; });
  says("has no place in this model", [](auto& c) { c["target_modules"] = {"q_proj"}; });
  says("is missing, though the adapter's configuration", [](auto& c) { c["modules_to_save"] = {"embed_tokens"}; });
  // Of another base.
  TinyTrainer wide(tiny_run(scratch / "wide", {"train.max_steps=1", "model.init.hidden_size=40"}));
  const fs::path other = wide->run().final_model;
  const std::string error = refusal("refused", {"model.path=" + other.string(), "lora.adapter=" + good.string()});
  EXPECT_NE(error.find("is the adapter of another model?"), std::string::npos) << error;
}

TEST_F(LoraTraining, BadOptionsAreRefusedByName) {
  const auto says = [&](const std::string& part, const std::vector<std::string>& overrides) {
    const std::string error = user_error_of([&] { run_model_config(config("refused", overrides)); });
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  says("lora.rank", {"lora.rank=0"});
  says("'wq' is not a linear layer of these models", {"lora.targets=[wq]"});
  says("all-linear or a list of names", {"lora.targets=[]"});
  says("'biases' is not known; choose from norms, embedding, head", {"lora.train=[biases]"});
  says("this model shares its LM head with the embedding", {"lora.train=[head]"});
  says("lora.dropout", {"lora.dropout=1.5"});
}

// Random bases have no place that an adapter could name: only the adapter is written.
TEST_F(LoraTraining, OnARandomBase) {
  const RunConfig config = tiny_run(scratch / "random", {"lora={rank: 2}", "train.max_steps=2"});
  TinyTrainer trainer(config);
  const TrainSummary summary = trainer->run();
  EXPECT_TRUE(json_of(summary.final_model / "adapter_config.json")["base_model_name_or_path"].is_null());
  EXPECT_TRUE(summary.merged.empty());
  const std::string error = user_error_of([&] { tiny_run(scratch / "refused", {"lora={rank: 2, merged: true}"}); });
  EXPECT_NE(error.find("there is no checkpoint to merge the adapter into"), std::string::npos) << error;
}

}  // namespace
}  // namespace sb
