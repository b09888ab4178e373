#include "run/config/run_config_precision.h"

#include <fmt/format.h>

#include "core/errors.h"

namespace sb {
namespace {

constexpr int kMostLayers = 1 << 16;

// A layer by its number, or the first or last one whatever their number is.
int read_layer(const ConfigValue& item, const std::string& label) {
  if (item.kind == ConfigValue::Kind::scalar && item.text == "first") return 0;
  if (item.kind == ConfigValue::Kind::scalar && item.text == "last") return kLastLayer;
  return static_cast<int>(config_integer(item, label, 0, kMostLayers));
}

std::string layer_text(int layer) {
  return layer == kLastLayer ? "last" : std::to_string(layer);
}

}  // namespace

void add_precision_options(OptionTable& table, TrainOptions& train) {
  using Precision = TrainOptions::Precision;
  table.choice<Precision>("train.precision", &train.precision,
                          {{"auto", Precision::automatic}, {"float32", Precision::float32}, {"fp8", Precision::fp8}},
                          "dtype of the computation; auto: bfloat16 on device: cuda, float32 on the CPU; fp8: "
                          "bfloat16, with the layers' matmuls in e4m3 (docs/fp8.md)");
  table.add(
      "train.fp8_skip", "list of first, last or layer numbers", "",
      "precision fp8: layers whose matmuls stay in bfloat16",
      [&train](const ConfigValue& given, const std::string& label) {
        SB_USER_CHECK(given.kind == ConfigValue::Kind::list,
                      "{}: {}: expected a list of layers, for example [first, last] or [0, 1, 35]", given.where, label);
        train.fp8_skip.clear();
        for (const ConfigValue& item : given.items) train.fp8_skip.push_back(read_layer(item, label));
      },
      [&train] {
        std::vector<std::string> names;
        for (const int layer : train.fp8_skip) names.push_back(layer_text(layer));
        return fmt::format("[{}]", fmt::join(names, ", "));
      });
}

void check_precision(const RunConfig& config, const OptionTable& table) {
  if (config.train.precision != TrainOptions::Precision::fp8) {
    SB_USER_CHECK(config.train.fp8_skip.empty(), "{}: only applies to train.precision: fp8; remove it, or set that",
                  table.label("train.fp8_skip"));
    return;
  }
  const std::string label = table.label("train.precision");
  SB_USER_CHECK(config.device == DeviceKind::cuda, "{}: fp8 needs a GPU; set device: cuda, or train.precision: auto",
                label);
  SB_USER_CHECK(!config.lora,
                "{}: fp8 does not support lora, which freezes the model; set train.precision: auto, or remove lora",
                label);
}

void check_precision_fits(const RunConfig& config, const ModelConfig& model) {
  if (config.train.precision != TrainOptions::Precision::fp8) return;
  check_fp8(model, config.lora_config());
  for (const int layer : config.train.fp8_skip)
    SB_USER_CHECK(layer < model.layers, "train.fp8_skip: there is no layer {}; the model has layers 0 to {}", layer,
                  model.layers - 1);
}

}  // namespace sb
