#include "run/checkpoint/selection_file.h"

#include <fmt/format.h>

#include "core/errors.h"
#include "model/tensors/safetensors.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

using Sums = std::vector<double> PlaneSums::*;
constexpr std::pair<const char*, Sums> kSums[] = {{"planes.query_squares", &PlaneSums::query_squares},
                                                  {"planes.key_sums", &PlaneSums::key_sums},
                                                  {"planes.key_squares", &PlaneSums::key_squares}};

// A tensor of a certain shape; empty where there is none of that name.
std::vector<float> read_tensor(const SafetensorsFile& file, const char* name, const std::vector<int64_t>& shape) {
  const SafetensorsEntry* entry = file.find(name);
  if (entry == nullptr) return {};
  SB_USER_CHECK(entry->shape == shape, "{}: {} is {}, but this model needs [{}]; does it belong to another model?",
                file.path().string(), name, entry->shape_text(), fmt::join(shape, ", "));
  std::vector<float> values(static_cast<size_t>(entry->elements()));
  file.read_f32(*entry, values);
  return values;
}

std::vector<PlaneSums> read_planes(const SafetensorsFile& file, const ModelConfig& model) {
  const std::vector<float> tokens = read_tensor(file, "planes.tokens", {model.layers});
  std::vector<PlaneSums> planes(tokens.size());
  for (size_t layer = 0; layer < tokens.size(); ++layer) planes[layer].tokens = tokens[layer];
  const size_t width = static_cast<size_t>(model.kv_heads) * static_cast<size_t>(model.head_dim);
  for (const auto& [name, member] : kSums) {
    const std::vector<float> values = read_tensor(file, name, {model.layers, model.kv_heads, model.head_dim});
    SB_USER_CHECK(values.size() == tokens.size() * width, "{}: {} is missing", file.path().string(), name);
    for (size_t layer = 0; layer < planes.size(); ++layer) {
      const float* row = values.data() + layer * width;
      if (tokens[layer] > 0) (planes[layer].*member).assign(row, row + width);
    }
  }
  return planes;
}

std::map<MassKey, MassThreshold> read_thresholds(const SafetensorsFile& file) {
  const SafetensorsEntry* entry = file.find("mass.keys");
  if (entry == nullptr) return {};
  const std::vector<int64_t> shape = {entry->shape.empty() ? 0 : entry->shape.front(), 3};
  const std::vector<float> keys = read_tensor(file, "mass.keys", shape),
                           values = read_tensor(file, "mass.values", shape);
  SB_USER_CHECK(values.size() == keys.size(), "{}: mass.values is missing", file.path().string());
  std::map<MassKey, MassThreshold> thresholds;
  for (size_t i = 0; i < keys.size(); i += 3)
    thresholds[{static_cast<int>(keys[i]), static_cast<int>(keys[i + 1]), static_cast<int>(keys[i + 2])}] = {
        values[i], values[i + 1], values[i + 2]};
  return thresholds;
}

}  // namespace

void write_selection_file(const fs::path& file, const LearnedSelection& learned, const ModelConfig& model) {
  std::vector<SafetensorsTensor> tensors;
  const auto layers = static_cast<int64_t>(learned.planes.size());
  std::vector<float> tokens, sums[std::size(kSums)], keys, values;
  if (layers > 0) {
    SB_CHECK(layers == model.layers, "planes of {} layers for {}", layers, model.layers);
    const size_t width = static_cast<size_t>(model.kv_heads) * static_cast<size_t>(model.head_dim);
    for (const PlaneSums& layer : learned.planes) tokens.push_back(static_cast<float>(layer.tokens));
    tensors.push_back({"planes.tokens", {layers}, tokens.data()});
    for (size_t i = 0; i < std::size(kSums); ++i) {
      for (const PlaneSums& layer : learned.planes) {
        const std::vector<double>& from = layer.*kSums[i].second;
        sums[i].insert(sums[i].end(), from.begin(), from.end());
        if (from.empty()) sums[i].insert(sums[i].end(), width, 0.0f);
      }
      tensors.push_back({kSums[i].first, {layers, model.kv_heads, model.head_dim}, sums[i].data()});
    }
  }
  for (const auto& [key, threshold] : learned.thresholds) {
    for (const int part : {key.layer, key.length_class, key.budget_class}) keys.push_back(static_cast<float>(part));
    values.insert(values.end(), {threshold.correction, threshold.gain, threshold.last});
  }
  const auto count = static_cast<int64_t>(learned.thresholds.size());
  if (count > 0) {
    tensors.push_back({"mass.keys", {count, 3}, keys.data()});
    tensors.push_back({"mass.values", {count, 3}, values.data()});
  }
  if (!tensors.empty()) write_safetensors(file, tensors, DType::f32);
}

FoundSelection read_selection_of(const fs::path& folder, const ModelConfig& model) {
  for (const fs::path& file : {folder / kSelectionFile, folder / kSelectionFolder / kSelectionFile}) {
    if (!fs::exists(file)) continue;
    try {
      const SafetensorsFile in(file);
      return {{read_planes(in, model), read_thresholds(in)}, {}};
    } catch (const UserError& error) {
      return {{}, error.what()};
    }
  }
  return {{}, fmt::format("{}: has no {} (earlier versions did not write one)", folder.string(), kSelectionFile)};
}

}  // namespace sb
