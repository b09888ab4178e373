#include "tests/model/model_fixture.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/random.h"
#include "device/host_floats.h"
#include "device/memory.h"

namespace sb::test {

namespace {

std::vector<int32_t> read_i32(const SafetensorsFile& file, const char* name) {
  const SafetensorsEntry* entry = file.find(name);
  SB_CHECK(entry && entry->dtype == "I32", "{} in {}", name, file.path().string());
  std::vector<int32_t> values(static_cast<size_t>(entry->elements()));
  std::memcpy(values.data(), file.data(*entry).data(), values.size() * sizeof(int32_t));
  return values;
}

Tensors hf_tensors(const ParameterSet& parameters, bool gradients) {
  Tensors tensors;
  const HostCopy flat(gradients ? parameters.gradients() : parameters.values());
  for (int i = 0; i < parameters.count(); ++i) {
    const TensorView view = parameters.part(flat.view(), i);
    for (const Parameter::Part& part : parameters.parameter(i).parts) {
      const TensorView rows = view.rows(part.row_begin, part.row_end);
      tensors[part.hf_name] = {rows.f32(), rows.f32() + rows.elements()};
    }
  }
  return tensors;
}

}  // namespace

HfFixture::HfFixture(const std::string& name) : directory(std::filesystem::path(SB_TEST_DATA) / "hf" / name) {
  const SafetensorsFile file(directory / "expected.safetensors");
  const std::vector<int32_t> ids = read_i32(file, "input_ids"), borders = read_i32(file, "cu_seqlens");
  for (size_t s = 0; s + 1 < borders.size(); ++s) {
    sequences.emplace_back(ids.begin() + borders[s], ids.begin() + borders[s + 1]);
  }
  for (const SafetensorsEntry& entry : file.header().entries) {
    if (entry.dtype != "F32") continue;
    std::vector<float>& values = expected[entry.name];
    values.resize(static_cast<size_t>(entry.elements()));
    file.read_f32(entry, values);
  }
  const auto json = nlohmann::json::parse(read_file(directory / "expected.json"));
  loss = json["loss"];
  losses = json["losses"].get<std::vector<double>>();
  grad_norms = json["grad_norms"].get<std::vector<double>>();
  const auto& adamw = json["adamw"];
  learning_rate = adamw["lr"];
  beta1 = adamw["betas"][0];
  beta2 = adamw["betas"][1];
  eps = adamw["eps"];
  weight_decay = adamw["weight_decay"];
  clip = adamw["clip"];
}

int64_t count_targets(const std::vector<std::vector<int32_t>>& sequences) {
  int64_t targets = 0;
  for (const auto& sequence : sequences) targets += std::ssize(sequence) - 1;
  return targets;
}

MicroBatch pack(const std::vector<std::vector<int32_t>>& sequences, int64_t targets) {
  MicroBatch batch;
  for (const auto& sequence : sequences) {
    for (size_t i = 0; i < sequence.size(); ++i) {
      const bool counts = i + 1 < sequence.size();
      batch.tokens.push_back(sequence[i]);
      batch.positions.push_back(static_cast<int32_t>(i));
      batch.labels.push_back(counts ? sequence[i + 1] : kIgnoredLabel);
      batch.weights.push_back(counts ? static_cast<float>(1.0 / static_cast<double>(targets)) : 0.0f);
    }
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
    batch.sequence_ids.push_back(std::ssize(batch.sequence_ids));
  }
  return batch;
}

std::vector<std::vector<int32_t>> random_sequences(const std::vector<int64_t>& lengths, int64_t vocabulary,
                                                   uint64_t seed) {
  Random random(seed);
  std::vector<std::vector<int32_t>> sequences;
  for (const int64_t length : lengths) {
    auto& sequence = sequences.emplace_back();
    for (int64_t i = 0; i < length; ++i) {
      sequence.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(vocabulary))));
    }
  }
  return sequences;
}

StageOptions whole_model(const ModelConfig& config, int64_t tokens, Recompute recompute) {
  StageOptions options;
  options.last_layer = config.layers;
  options.recompute = recompute;
  options.max_micro_batch_tokens = tokens;
  options.max_sequence_length = tokens;
  options.loss_chunk = 48;
  return options;
}

Tensors hf_gradients(ParameterSet& parameters) {
  return hf_tensors(parameters, true);
}

Tensors hf_values(ParameterSet& parameters) {
  return hf_tensors(parameters, false);
}

std::vector<float> host_values(const TensorView& tensor) {
  const HostFloats floats(tensor);
  return {floats.values().begin(), floats.values().end()};
}

std::vector<float> all_logits(Stage& stage, const Exec& exec, const MicroBatch& batch) {
  stage.evaluate(exec, batch, 0, {});
  const int64_t tokens = batch.size(), vocabulary = stage.config().vocab_size;
  Arena memory = make_arena("logits", tokens * vocabulary * dtype_bytes(stage.options().dtype), exec.device);
  const TensorView logits = memory.allocate(stage.options().dtype, {tokens, vocabulary});
  // In two pieces, as evaluation asks for them.
  const int64_t middle = tokens / 3;
  stage.logits(exec, 0, 0, middle, logits.rows(0, middle));
  stage.logits(exec, 0, middle, tokens, logits.rows(middle, tokens));
  return host_values(logits);
}

double norm(const std::vector<float>& x) {
  double squares = 0;
  for (const float value : x) squares += double{value} * double{value};
  return std::sqrt(squares);
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b, double floor) {
  if (a.size() != b.size()) return INFINITY;
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (double{a[i]} - double{b[i]}) * (double{a[i]} - double{b[i]});
  return std::sqrt(squares) / std::max(norm(b), floor);
}

double largest_relative_difference(const Tensors& got, const Tensors& expected, double floor, double key_bias_floor) {
  EXPECT_EQ(got.size(), expected.size());
  double top = 0;
  for (const auto& [name, values] : expected) top = std::max(top, norm(values));
  double worst = 0;
  for (const auto& [name, values] : expected) {
    const auto found = got.find(name);
    if (found == got.end()) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    const double own_floor = name.ends_with("k_proj.bias") ? std::max(floor, key_bias_floor) : floor;
    const double difference = relative_difference(found->second, values, own_floor * top);
    worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
  }
  return worst;
}

ModelConfig tiny_config(ModelConfig::Family family) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 13;
  config.hidden_size = 8;
  config.intermediate_size = 11;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 6;  // not hidden_size / heads
  config.initializer_range = 0.3f;
  config.max_position_embeddings = 64;
  config.qkv_bias = family == ModelConfig::Family::qwen2;
  config.qk_norm = family == ModelConfig::Family::qwen3;
  return config;
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "sb_model_XXXXXX").string();
  SB_CHECK(::mkdtemp(pattern.data()) != nullptr, "no temporary directory");
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  SB_CHECK(file.is_open(), "{}", path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace sb::test
