#include "tests/train/tiny_run.h"

#include <algorithm>

#include "data/synthetic/synthetic.h"
#include "model/tensors/tensor_files.h"
#include "train/training_run.h"

namespace sb {

RunConfig tiny_run(const std::filesystem::path& output_dir, const std::vector<std::string>& overrides) {
  const std::string yaml = R"(
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data:
  synthetic: {task: chunk_recall, vocab_size: 16, length: 48, min_length: 17, chunk: 4}
batch: {global_batch_size: 4, micro_batch_sequences: 2}
optimizer: {learning_rate: 5.0e-3, schedule: constant, warmup_steps: 2}
train: {max_steps: 20, save_steps: 5, save_total_limit: 2, threads: 2, validation_sequences: 3, tensorboard: false}
)";
  std::vector<std::string> all = {"train.output_dir=" + output_dir.string()};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_run_config(yaml, "tiny.yaml", all);
}

struct TinyTrainer::Parts {
  std::FILE* out = std::fopen("/dev/null", "w");
  Console console{out, false, 1};
  DenseAttention attention;
  std::unique_ptr<SequenceSource> source, validation;
  std::unique_ptr<RunDirectory> directory;
  ~Parts() { std::fclose(out); }
};

TinyTrainer::TinyTrainer(const RunConfig& config, const Replace& replace) : parts_(std::make_unique<Parts>()) {
  SyntheticOptions task = *config.data.synthetic;
  parts_->source = make_synthetic_source(task, config.train.seed);
  task.curriculum.reset();
  parts_->validation = make_synthetic_source(task, config.train.seed + 1);
  parts_->directory = replace.world && replace.world->rank() > 0 ? std::make_unique<RunDirectory>(config, std::nullopt)
                                                                 : std::make_unique<RunDirectory>(config);
  TrainerParts parts{run_model_config(config),
                     replace.attention ? *replace.attention : parts_->attention,
                     replace.source ? *replace.source : *parts_->source,
                     {replace.validation ? replace.validation : parts_->validation.get(),
                      config.train.validation_sequences, task.chunk},
                     parts_->console,
                     replace.stop_requested,
                     replace.sparse};
  parts.planner = replace.planner;
  parts.world = replace.world;
  trainer_ = std::make_unique<Trainer>(config, parts, *parts_->directory);
}

TinyTrainer::~TinyTrainer() = default;

int64_t ListSource::length(uint64_t position) const {
  return static_cast<int64_t>(sequences_[position % sequences_.size()].tokens.size());
}

int64_t ListSource::valid_targets(uint64_t position) const {
  const std::vector<int32_t>& labels = sequences_[position % sequences_.size()].labels;
  return static_cast<int64_t>(labels.size()) - std::count(labels.begin(), labels.end(), kIgnoredLabel);
}

TokenSequence ListSource::read(uint64_t position) const {
  return sequences_[position % sequences_.size()];
}

int64_t ListSource::max_length() const {
  size_t longest = 0;
  for (const TokenSequence& sequence : sequences_) longest = std::max(longest, sequence.tokens.size());
  return static_cast<int64_t>(longest);
}

std::vector<float> weights_of(Trainer& trainer) {
  const TensorView values = trainer.stage().parameters().values();
  return {values.f32(), values.f32() + values.elements()};
}

std::map<std::string, std::string> checkpoint_tensors(const std::filesystem::path& checkpoint) {
  std::map<std::string, std::string> tensors;
  const bool adapters = std::filesystem::exists(checkpoint / "adapter_model.safetensors");
  for (const char* stem : {adapters ? "adapter_model" : "model", "optimizer"}) {
    TensorFiles files(checkpoint, stem);
    for (const auto& [name, file] : files.places()) {
      const std::span<const std::byte> data = files.file_of(name).data(files.entry(name));
      tensors[name].assign(reinterpret_cast<const char*>(data.data()), data.size());
    }
  }
  return tensors;
}

std::vector<float> moments_of(const std::filesystem::path& checkpoint) {
  TensorFiles files(checkpoint, "optimizer");
  std::vector<float> all;
  for (const auto& [name, file] : files.places()) {
    const SafetensorsEntry& entry = files.entry(name);
    std::vector<float> values(static_cast<size_t>(entry.elements()));
    files.file_of(name).read_f32(entry, values);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

std::vector<float> gradients_of(Trainer& trainer) {
  const TensorView values = trainer.stage().parameters().gradients();
  return {values.f32(), values.f32() + values.elements()};
}

std::string user_error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

}  // namespace sb
