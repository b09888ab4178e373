#include "train/adapter_start.h"

#include <fmt/format.h>

#include "core/errors.h"
#include "core/files/crc32c.h"
#include "model/adapter/merge.h"
#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"
#include "model/initialization.h"
#include "run/checkpoint/new_directory.h"

namespace sb {
namespace {

// A sum over the tensors, so that stages can add theirs.
int64_t tensor_fingerprint(const FlatTensor& tensor, const float* values) {
  const uint32_t name = crc32c(0, tensor.name.data(), tensor.name.size());
  return crc32c(name, values, static_cast<size_t>(tensor.elements()) * sizeof(float));
}

// Reads the model; trained tensors of it go to `trained`.
int64_t read_base(const RunConfig& config, RankModel& ranks, const TensorView& trained) {
  Stage& stage = ranks.stage();
  const Grid& grid = ranks.grid();
  const bool counts = grid.dp_rank() == 0 && grid.cp_rank() == 0 && grid.tp_rank() == 0, second_copy = grid.stage() > 0;
  int64_t sum = 0;
  read_hf_base(config.model.path, stage.frozen_parameters(), stage.parameters(), trained,
               [&](const FlatTensor& tensor, const float* values) {
                 const bool elsewhere = second_copy && tensor.name == "model.embed_tokens.weight";
                 if (counts && !elsewhere) sum += tensor_fingerprint(tensor, values);
               });
  return sum;
}

}  // namespace

std::string start_adapters(const RunConfig& config, const ModelConfig& model, RankModel& ranks,
                           const std::optional<std::filesystem::path>& checkpoint) {
  ParameterSet& parameters = ranks.stage().parameters();
  std::string fingerprint;
  if (config.model.path.empty()) {
    ranks.stage().initialize(config.train.seed);
    const std::string text = write_model_config(model, "float32");
    fingerprint = fmt::format("seed {} of {:08x}", config.train.seed, crc32c(0, text.data(), text.size()));
    if (!checkpoint && config.lora->adapter.empty()) return fingerprint;
  }
  const HostCopy values = parameters.host_values();
  if (!config.model.path.empty())
    fingerprint = fmt::format("{:x}", ranks.grid().world().all_reduce(read_base(config, ranks, values.view())));
  if (checkpoint)
    PeftAdapter(*checkpoint, model, config.lora->config).read(parameters, values.view());
  else if (!config.lora->adapter.empty())
    PeftAdapter(config.lora->adapter, model).read(parameters, values.view());
  else
    initialize_adapters(parameters, values.view(), config.train.seed);
  parameters.store_values(values);
  return fingerprint;
}

void check_adapter_to_continue(const RunConfig& config, const ModelConfig& model) {
  if (!config.lora || config.lora->adapter.empty()) return;
  // A run that resumes has what came of it in its checkpoints.
  if (config.train.resume != "never" && !checkpoint_steps(config.train.output_dir).empty()) return;
  const std::string where = config.lora->adapter.string();
  const PeftAdapter adapter(config.lora->adapter, model);
  const LoraConfig &found = adapter.config(), &wanted = config.lora->config;
  const auto agree = [&](bool same, const char* option, const auto& own, const auto& theirs) {
    SB_USER_CHECK(
        same, "lora.{}: {}, but the adapter in {} has {}; set it to that, or remove lora.adapter to train a new one",
        option, own, where, theirs);
  };
  const auto parts = [](const LoraConfig& lora) {
    std::vector<std::string> names;
    if (lora.norms) names.emplace_back("norms");
    if (lora.embedding) names.emplace_back("embedding");
    if (lora.head) names.emplace_back("head");
    return fmt::format("[{}]", fmt::join(names, ", "));
  };
  const auto targets = [](const LoraConfig& lora) { return fmt::format("[{}]", fmt::join(lora.target_names(), ", ")); };
  agree(found.rank == wanted.rank, "rank", wanted.rank, found.rank);
  agree(found.alpha == wanted.alpha, "alpha", wanted.alpha, found.alpha);
  agree(found.rslora == wanted.rslora, "rslora", wanted.rslora, found.rslora);
  agree(found.targets == wanted.targets, "targets", targets(wanted), targets(found));
  agree(parts(found) == parts(wanted), "train", parts(wanted), parts(found));
}

void check_same_base(const std::filesystem::path& checkpoint, const std::string& saved, const std::string& loaded) {
  SB_USER_CHECK(saved == loaded,
                "{}: its adapters were trained on a different model from the one in model.path now (fingerprint {}, "
                "now {}); restore that model, or start over with another train.output_dir",
                checkpoint.string(), saved, loaded);
}

std::filesystem::path write_merged_model(const RunConfig& config, const ModelConfig& model,
                                         const std::filesystem::path& adapter, const std::filesystem::path& directory,
                                         ThreadPool& pool) {
  if (!config.writes_merged()) return {};
  const std::filesystem::path merged = directory / "merged";
  MergeOptions options;
  options.base = config.model.path;
  options.adapter = adapter;
  options.config = model;
  options.dtype = config.model.save_dtype;
  write_directory_atomically(merged,
                             [&](const std::filesystem::path& temporary) { merge_adapter(pool, options, temporary); });
  return merged;
}

}  // namespace sb
