#include "model/hf_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "model/tensors/safetensors.h"
#include "model/tensors/tensor_files.h"

namespace sb {

namespace fs = std::filesystem;

namespace {

constexpr const char* kStem = "model";
const std::string kSingleFile = tensor_file_name(kStem, 1, 1), kIndexFile = tensor_index_name(kStem);
constexpr const char* kTemporarySuffix = ".tmp";
constexpr std::string_view kLayers = "model.layers.";
constexpr const char* kCompanions[] = {"generation_config.json",
                                       "tokenizer.json",
                                       "tokenizer_config.json",
                                       "tokenizer.model",
                                       "vocab.json",
                                       "merges.txt",
                                       "added_tokens.json",
                                       "special_tokens_map.json",
                                       "chat_template.json",
                                       "chat_template.jinja"};

// The weights of a directory; names what is there instead where they are of another kind.
TensorFiles open_weights(const fs::path& directory) {
  SB_USER_CHECK(fs::is_directory(directory), "{}: no such directory", directory.string());
  const bool safetensors = fs::exists(directory / kSingleFile) || fs::exists(directory / kIndexFile);
  SB_USER_CHECK(safetensors || (!fs::exists(directory / "pytorch_model.bin") &&
                                !fs::exists(directory / "pytorch_model.bin.index.json")),
                "{}: only pytorch_model.bin is there; save the model as safetensors", directory.string());
  return TensorFiles(directory, kStem);
}

// "model.layers.12." of a tensor in layer 12; empty: in none.
std::string layer_of(const std::string& name) {
  if (!name.starts_with(kLayers)) return {};
  return name.substr(0, name.find('.', kLayers.size()) + 1);
}

int64_t layer_number(const std::string& name) {
  return std::atoll(name.c_str() + kLayers.size());
}

// Outside the layers, under the names that belong to the decoder: a bias of the head, another norm.
bool is_of_decoder(const std::string& name) {
  constexpr std::string_view kKnown[] = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"};
  if (!layer_of(name).empty() || std::ranges::find(kKnown, name) != std::end(kKnown)) return false;
  return name.starts_with("model.") || name.starts_with("lm_head.");
}

// A tensor of the decoder that we do not have (an extra bias, a quantization scale, an adapter) changes what the model
// computes, and so does a whole layer too many: they may not be passed over. What else a file holds is of other parts.
void refuse_unknown_tensors(const fs::path& directory, const std::map<std::string, std::string>& files,
                            const std::vector<FlatTensor>& wanted) {
  std::set<std::string> names, layers;
  int64_t last_layer = -1;
  for (const FlatTensor& tensor : wanted) {
    names.insert(tensor.name);
    if (layer_of(tensor.name).empty()) continue;
    layers.insert(layer_of(tensor.name));
    last_layer = std::max(last_layer, layer_number(tensor.name));
  }
  // Other stages have other layers; the one that ends the model knows how many there are.
  const bool ends_the_model = names.contains("model.norm.weight");
  for (const auto& [name, file] : files) {
    SB_USER_CHECK(!ends_the_model || layer_of(name).empty() || layer_number(name) <= last_layer,
                  "{}: tensor '{}' is of a layer beyond the {} of config.json; is its num_hidden_layers right?",
                  (directory / file).string(), name, last_layer + 1);
    if (names.contains(name) || (!layers.contains(layer_of(name)) && !is_of_decoder(name))) continue;
    if (name.ends_with("rotary_emb.inv_freq")) continue;  // old checkpoints stored what config.json says anyway
    throw UserError("{}: tensor '{}' has no place in the model that config.json describes", (directory / file).string(),
                    name);
  }
}

// A tensor that is to be read and where to; nullptr: into parameters that are only kept rounded.
struct WantedTensor {
  FlatTensor tensor;
  float* values;
};

void read_tensors(const fs::path& directory, const std::vector<WantedTensor>& wanted, ParameterSet& rounded,
                  const TensorRead& then) {
  std::vector<FlatTensor> tensors;
  for (const WantedTensor& want : wanted) tensors.push_back(want.tensor);
  HfTensors files(directory, tensors);
  std::vector<float> whole, part;
  for (const auto& [tensor, to] : wanted) {
    if (to == nullptr) part.resize(static_cast<size_t>(tensor.end - tensor.begin));
    float* values = to == nullptr ? part.data() : to;
    if (then) {
      whole.resize(static_cast<size_t>(tensor.elements()));
      files.read(tensor, whole.data());
      then(tensor, whole.data());
      tensor.take_part(whole.data(), values);
    } else {
      files.read_part(tensor, values);
    }
    if (to == nullptr) rounded.store_rounded(tensor, values);
  }
}

// Files written under temporary names, put in place together. Whatever was not put in place is removed.
class PendingFiles {
 public:
  explicit PendingFiles(fs::path directory) : directory_(std::move(directory)) {}
  ~PendingFiles() {
    std::error_code ignored;
    for (const std::string& name : names_) fs::remove(temporary(name), ignored);
  }

  // The name to write under.
  fs::path add(const std::string& name) {
    names_.push_back(name);
    return temporary(name);
  }

  void put_in_place() {
    for (const std::string& name : names_) {
      std::error_code error;
      fs::rename(temporary(name), directory_ / name, error);
      SB_USER_CHECK(!error, "{}: cannot put it in place: {}", (directory_ / name).string(), error.message());
    }
    sync_directory(directory_);
  }

  const std::vector<std::string>& names() const { return names_; }

 private:
  fs::path temporary(const std::string& name) const { return directory_ / (name + kTemporarySuffix); }

  fs::path directory_;
  std::vector<std::string> names_;
};

std::vector<std::vector<SafetensorsTensor>> cut_into_shards(std::span<const SafetensorsTensor> tensors,
                                                            const HfWriteOptions& options) {
  std::vector<std::vector<SafetensorsTensor>> shards(1);
  int64_t shard_bytes = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const int64_t bytes = tensor.elements() * dtype_bytes(options.dtype);
    if (!shards.back().empty() && shard_bytes + bytes > options.max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shard_bytes += bytes;
    shards.back().push_back(tensor);
  }
  return shards;
}

void write_weights(PendingFiles& files, std::span<const SafetensorsTensor> tensors, const HfWriteOptions& options) {
  const auto shards = cut_into_shards(tensors, options);
  const auto count = static_cast<int>(shards.size());
  std::map<std::string, std::string> places;
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const std::string name = tensor_file_name(kStem, i + 1, count);
    write_safetensors(files.add(name), shards[static_cast<size_t>(i)], options.dtype);
    for (const SafetensorsTensor& tensor : shards[static_cast<size_t>(i)]) {
      places[tensor.name] = name;
      total += tensor.elements() * dtype_bytes(options.dtype);
    }
  }
  if (count > 1) write_tensor_index(files.add(kIndexFile), places, total);
}

void copy_companions(PendingFiles& files, const fs::path& from) {
  for (const char* name : kCompanions) {
    if (!fs::exists(from / name)) continue;
    const fs::path temporary = files.add(name);
    std::error_code error;
    fs::remove(temporary, error);
    fs::copy_file(from / name, temporary, error);
    SB_USER_CHECK(!error, "{}: cannot copy it to {}: {}", (from / name).string(), temporary.string(), error.message());
    sync_file(temporary);
  }
}

void write_companions(PendingFiles& files, const fs::path& directory, const ModelConfig& config,
                      const HfWriteOptions& options) {
  write_new_file(files.add("config.json"),
                 write_model_config(config, options.dtype == DType::bf16 ? "bfloat16" : "float32"));
  const bool in_place =
      !options.copy_from.empty() && fs::exists(options.copy_from) && fs::equivalent(options.copy_from, directory);
  if (!options.copy_from.empty() && !in_place) copy_companions(files, options.copy_from);
}

// An older model's weights under names the new one does not use would be found first, or only waste space.
void remove_older_weights(const fs::path& directory, const std::vector<std::string>& written) {
  std::vector<fs::path> older;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const bool weights =
        name == kSingleFile || name == kIndexFile ||
        (name.starts_with("model-") && name.find("-of-") != std::string::npos && name.ends_with(".safetensors"));
    if (weights && std::find(written.begin(), written.end(), name) == written.end()) older.push_back(entry.path());
  }
  for (const fs::path& path : older) fs::remove(path);
}

}  // namespace

HfTensors::HfTensors(const fs::path& directory, const std::vector<FlatTensor>& wanted)
    : files_(open_weights(directory)) {
  refuse_unknown_tensors(directory, files_.places(), wanted);
  for (const FlatTensor& tensor : wanted)
    SB_USER_CHECK(files_.places().contains(tensor.name), "{}: tensor '{}' is missing{}", directory.string(),
                  tensor.name,
                  tensor.name == "lm_head.weight" ? " (does config.json lack \"tie_word_embeddings\": true?)" : "");
}

const SafetensorsEntry& HfTensors::entry(const FlatTensor& tensor) {
  const SafetensorsEntry& entry = files_.entry(tensor.name);
  SB_USER_CHECK(entry.shape == tensor.shape, "{}: tensor '{}' has shape {}, config.json requires {}",
                files_.file_of(tensor.name).path().string(), tensor.name, entry.shape_text(),
                fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
  return entry;
}

void HfTensors::read(const FlatTensor& tensor, float* values) {
  const SafetensorsEntry& whole = entry(tensor);
  files_.file_of(tensor.name).read_f32(whole, {values, static_cast<size_t>(tensor.elements())});
}

void HfTensors::read_part(const FlatTensor& tensor, float* values) {
  const SafetensorsEntry& whole = entry(tensor);
  const SafetensorsFile& file = files_.file_of(tensor.name);
  tensor.each_run([&](int64_t here, int64_t first, int64_t count) {
    file.read_f32_from(whole, first, {values + here, static_cast<size_t>(count)});
  });
}

bool HfTensors::is_bf16(const FlatTensor& tensor) {
  return entry(tensor).dtype == "BF16";
}

void read_hf_weights(const fs::path& directory, ParameterSet& parameters, const TensorRead& then) {
  const bool rounded = parameters.is_rounded_only();
  std::optional<HostCopy> values;
  if (!rounded) values.emplace(parameters.host_values());
  std::vector<WantedTensor> wanted;
  for (FlatTensor& tensor : parameters.flat_tensors()) {
    float* to = rounded ? nullptr : values->view().f32() + tensor.begin;
    wanted.push_back({std::move(tensor), to});
  }
  read_tensors(directory, wanted, parameters, then);
  if (!rounded) parameters.store_values(*values);
}

void read_hf_base(const fs::path& directory, ParameterSet& frozen, const ParameterSet& trained,
                  const TensorView& values, const TensorRead& then) {
  const bool rounded = frozen.is_rounded_only();
  std::optional<HostCopy> frozen_values;
  if (!rounded) frozen_values.emplace(frozen.host_values());
  std::vector<WantedTensor> wanted;
  for (FlatTensor& tensor : frozen.flat_tensors()) {
    float* to = rounded ? nullptr : frozen_values->view().f32() + tensor.begin;
    wanted.push_back({std::move(tensor), to});
  }
  for (FlatTensor& tensor : trained.flat_tensors()) {
    if (tensor.name.find(".lora_") != std::string::npos) continue;
    float* to = values.f32() + tensor.begin;
    tensor.name.erase(0, kPeftPrefix.size());
    wanted.push_back({std::move(tensor), to});
  }
  read_tensors(directory, wanted, frozen, then);
  if (!rounded) frozen.store_values(*frozen_values);
}

void write_hf_model(const fs::path& directory, const ModelConfig& config, const ParameterSet& parameters,
                    const HfWriteOptions& options) {
  SB_USER_CHECK(fs::is_directory(directory), "{}: no such directory", directory.string());
  const HostCopy values = parameters.host_values();
  std::vector<SafetensorsTensor> tensors;
  for (FlatTensor& tensor : parameters.flat_tensors())
    tensors.push_back({std::move(tensor.name), std::move(tensor.shape), values.view().f32() + tensor.begin});
  write_hf_model(directory, config, tensors, options);
}

void write_hf_model(const fs::path& directory, const ModelConfig& config, std::span<const SafetensorsTensor> tensors,
                    const HfWriteOptions& options) {
  SB_USER_CHECK(fs::is_directory(directory), "{}: no such directory", directory.string());
  PendingFiles files(directory);
  write_weights(files, tensors, options);
  write_companions(files, directory, config, options);
  files.put_in_place();
  remove_older_weights(directory, files.names());
}

void write_hf_companions(const fs::path& directory, const ModelConfig& config, const HfWriteOptions& options) {
  PendingFiles files(directory);
  write_companions(files, directory, config, options);
  files.put_in_place();
}

}  // namespace sb
