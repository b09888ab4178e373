// What a run leaves: its checkpoints and the trained model.
#include <chrono>

#include "model/adapter/peft_adapter.h"
#include "model/hf_checkpoint.h"
#include "run/checkpoint/new_directory.h"
#include "run/checkpoint/selection_file.h"
#include "train/adapter_start.h"
#include "train/trainer.h"

namespace sb {

void Trainer::save() {
  if (saved_step_ == state_.step) return;
  const auto begin = std::chrono::steady_clock::now();
  const auto span = trace_.span("save", state_.step);
  saver_->wait();
  model_->settle();
  std::string measured;
  if (leads()) {
    state_.planner_state = planner_->state();
    const CoverageStatistics* coverage = planner_->coverage();
    if (coverage && !coverage->curves().empty()) measured = write_coverage(coverage->table(parts_.model.layers));
  }
  saver_->save(model_->own_tensors(), state_, measured);
  saved_step_ = state_.step;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  time_left_.save(took);
  saving_seconds_ += took.count();
}

void Trainer::write_final_model(TrainSummary& summary) {
  summary.final_model = directory_.path() / "final";
  const std::vector<SafetensorsTensor> weights = model_->weights();
  if (!leads()) return RankModel::serve(weights);
  write_directory_atomically(summary.final_model, [&](const std::filesystem::path& temporary) {
    HfWriteOptions options;
    options.dtype = config_.model.save_dtype;
    options.copy_from = config_.model.path;
    if (config_.lora)
      write_peft_adapter(temporary, config_.lora->config, parts_.model, config_.model.path.string(), weights);
    else
      write_hf_model(temporary, parts_.model, weights, options);
    if (state_.selection == LearnedSelection()) return;
    std::filesystem::create_directory(temporary / kSelectionFolder);
    write_selection_file(temporary / kSelectionFolder / kSelectionFile, state_.selection, parts_.model);
  });
  if (config_.lora)
    summary.merged = write_merged_model(config_, parts_.model, summary.final_model, directory_.path(), *exec_.pool);
}

}  // namespace sb
