#include "model/adapter/peft_adapter.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/utf8.h"
#include "device/blas.h"
#include "model/stage/stage.h"

namespace sb {
namespace {

const std::string kEmbedding = std::string(kPeftPrefix) + "model.embed_tokens.weight";
const std::string kHead = std::string(kPeftPrefix) + "lm_head.weight";

std::filesystem::path tensor_file(const std::filesystem::path& directory) {
  SB_USER_CHECK(std::filesystem::is_directory(directory), "{}: no such directory", directory.string());
  SB_USER_CHECK(
      std::filesystem::exists(directory / kAdapterFile) || !std::filesystem::exists(directory / "adapter_model.bin"),
      "{}: only adapter_model.bin is there; save the adapter as safetensors", directory.string());
  return directory / kAdapterFile;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace

std::vector<FlatTensor> adapter_tensors(const ModelConfig& model, const LoraConfig& lora) {
  StageOptions whole;
  whole.last_layer = model.layers;
  whole.lora = lora;
  return Stage::declare_parameters(model, whole).flat_tensors();
}

PeftAdapter::PeftAdapter(const std::filesystem::path& directory, const ModelConfig& model)
    : PeftAdapter(directory, model, read_peft_config(directory, model)) {}

PeftAdapter::PeftAdapter(const std::filesystem::path& directory, const ModelConfig& model, const LoraConfig& expected)
    : lora_(expected), file_(tensor_file(directory)) {
  check_tensors(model);
}

void PeftAdapter::check_tensors(const ModelConfig& model) const {
  std::map<std::string, const FlatTensor*> expected;
  const std::vector<FlatTensor> tensors = adapter_tensors(model, lora_);
  for (const FlatTensor& tensor : tensors) expected.emplace(tensor.name, &tensor);
  for (const auto& [name, tensor] : expected) {
    const SafetensorsEntry* found = file_.find(name);
    SB_USER_CHECK(found, "{}: tensor '{}' is missing, though the adapter's configuration requires it",
                  file_.path().string(), name);
    SB_USER_CHECK(found->shape == tensor->shape,
                  "{}: tensor '{}' has shape {}, this model and rank need {}: is the "
                  "adapter of another model?",
                  file_.path().string(), name, found->shape_text(), shape_text(tensor->shape));
  }
  for (const SafetensorsEntry& entry : file_.header().entries) {
    if (expected.contains(entry.name)) continue;
    // PEFT keeps a tied head as a tensor of its own.
    const bool tied_head = entry.name == kHead && model.tie_word_embeddings && lora_.embedding;
    SB_USER_CHECK(tied_head, "{}: tensor '{}' has no place in this model with the adapter's configuration",
                  file_.path().string(), printable(entry.name, 120));
    const SafetensorsEntry& embedding = this->entry(kEmbedding);
    SB_USER_CHECK(entry.dtype == embedding.dtype && std::ranges::equal(file_.data(entry), file_.data(embedding)),
                  "{}: '{}' and '{}' differ, but this model has one tensor for both", file_.path().string(), kHead,
                  kEmbedding);
  }
}

const SafetensorsEntry& PeftAdapter::entry(const std::string& name) const {
  const SafetensorsEntry* found = file_.find(name);
  SB_CHECK(found, "{}: no tensor {}", file_.path().string(), name);
  return *found;
}

void PeftAdapter::read(const ParameterSet& parameters, const TensorView& values) const {
  std::vector<float> whole;
  for (const FlatTensor& tensor : parameters.flat_tensors()) {
    whole.resize(static_cast<size_t>(tensor.elements()));
    file_.read_f32(entry(tensor.name), whole);
    tensor.take_part(whole.data(), values.f32() + tensor.begin);
  }
}

void PeftAdapter::merge(ThreadPool& pool, const std::string& name, const std::vector<int64_t>& shape,
                        float* values) const {
  const std::string peft = std::string(kPeftPrefix) + name;
  const std::string module = peft.substr(0, peft.rfind(".weight"));
  const SafetensorsEntry* low = file_.find(module + ".lora_A.weight");
  const auto elements = static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1));
  if (low == nullptr) {
    if (const SafetensorsEntry* trained = file_.find(peft)) file_.read_f32(*trained, {values, elements});
    return;
  }
  const SafetensorsEntry& high = entry(module + ".lora_B.weight");
  std::vector<float> a(static_cast<size_t>(low->elements())), b(static_cast<size_t>(high.elements())),
      product(elements);
  file_.read_f32(*low, a);
  file_.read_f32(high, b);
  const int64_t rows = shape[0], columns = shape[1];
  parallel_sgemm(pool, {.m = rows,
                        .n = columns,
                        .k = lora_.rank,
                        .a = b.data(),
                        .lda = lora_.rank,
                        .b = a.data(),
                        .ldb = columns,
                        .c = product.data(),
                        .ldc = columns});
  const auto scale = static_cast<float>(lora_.scale());
  for (size_t i = 0; i < elements; ++i) values[i] += scale * product[i];
}

void write_peft_adapter(const std::filesystem::path& directory, const LoraConfig& lora, const ModelConfig& model,
                        const std::string& base, std::span<const SafetensorsTensor> tensors) {
  std::vector<SafetensorsTensor> written(tensors.begin(), tensors.end());
  // For PEFT, which would leave a tied head as it was.
  std::vector<float> head;
  if (lora.embedding && model.tie_word_embeddings) {
    const auto embedding = std::ranges::find(written, kEmbedding, &SafetensorsTensor::name);
    SB_CHECK(embedding != written.end(), "no tensor {}", kEmbedding);
    std::function<const float*()> fetch = embedding->fetch;
    if (const float* data = embedding->data) fetch = [data] { return data; };
    embedding->data = nullptr;
    const auto elements = static_cast<size_t>(embedding->elements());
    const std::vector<int64_t> shape = embedding->shape;
    embedding->fetch = [&head, fetch, elements] {
      const float* values = fetch();
      head.assign(values, values + elements);
      return values;
    };
    written.push_back({kHead, shape, nullptr, [&head] { return head.data(); }});
  }
  write_safetensors(directory / kAdapterFile, written, DType::f32);
  write_new_file(directory / kAdapterConfigFile, write_peft_config(lora, model, base));
}

}  // namespace sb
