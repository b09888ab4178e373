#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "run/config/run_config.h"
#include "train/rank_model.h"

namespace sb {

// Of a run with adapters: loads the frozen model, and the adapters from the checkpoint, from lora.adapter or new ones.
// Returns a fingerprint of the model, the same on all ranks and however they share it. Collective.
std::string start_adapters(const RunConfig& config, const ModelConfig& model, RankModel& ranks,
                           const std::optional<std::filesystem::path>& checkpoint);

// UserError when the adapter to go on from is of another model, or is not what run.yaml asks for.
void check_adapter_to_continue(const RunConfig& config, const ModelConfig& model);

// UserError when the adapters of a checkpoint were trained for another model.
void check_same_base(const std::filesystem::path& checkpoint, const std::string& saved, const std::string& loaded);

// Where it is wanted: `directory`/merged, the model with the adapter of a PEFT directory in its weights. Returns its
// path, or nothing.
std::filesystem::path write_merged_model(const RunConfig& config, const ModelConfig& model,
                                         const std::filesystem::path& adapter, const std::filesystem::path& directory,
                                         ThreadPool& pool);

}  // namespace sb
