#include "run/disk_room.h"

#include <algorithm>
#include <filesystem>

#include "core/log.h"
#include "core/memory_plan.h"
#include "model/stage/stage.h"
#include "run/checkpoint/checkpoint.h"
#include "run/time_left.h"

namespace sb {

namespace {

int64_t parameters_of(const ModelConfig& model) {
  StageOptions whole;
  whole.last_layer = model.layers;
  return Stage::declare_parameters(model, whole).elements();
}

// Of a folder's files on the disk, about.
int64_t occupied_bytes(const std::filesystem::path& folder) {
  constexpr uintmax_t kBlock = 4096;
  std::error_code ignored;
  uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (entry.is_regular_file(ignored)) bytes += (entry.file_size(ignored) / kBlock + 1) * kBlock;
  return static_cast<int64_t>(bytes);
}

}  // namespace

int64_t checkpoint_bytes(const RunConfig& config, const ModelConfig& model) {
  StageOptions whole;
  whole.last_layer = model.layers;
  whole.lora = config.lora_config();
  return 3 * Stage::declare_parameters(model, whole).elements() * dtype_bytes(DType::f32);
}

DiskNeed disk_need(const RunConfig& config, const ModelConfig& model, const std::vector<int64_t>& saved_steps) {
  DiskNeed need;
  need.checkpoint_bytes = checkpoint_bytes(config, model);
  need.model_bytes = parameters_of(model) * dtype_bytes(config.model.save_dtype);
  if (config.lora) need.model_bytes = (config.writes_merged() ? need.model_bytes : 0) + need.checkpoint_bytes / 3;
  const int64_t done = saved_steps.empty() ? 0 : saved_steps.back();
  need.checkpoints = times_due(done + 1, config.train.save_steps, config.train.max_steps);
  // A new one is complete before the oldest goes.
  if (const int64_t limit = config.train.save_total_limit; limit > 0)
    need.checkpoints = std::min(need.checkpoints, std::max<int64_t>(limit + 1 - std::ssize(saved_steps), 1));
  return need;
}

std::string advice_on_room(const RunConfig& config, const ModelConfig& model, const std::vector<int64_t>& saved_steps,
                           int64_t room) {
  const DiskNeed need = disk_need(config, model, saved_steps);
  if (room >= need.total()) return "";
  RunConfig fewest = config;
  fewest.train.save_total_limit = 1;
  const bool limit_helps = config.train.save_total_limit != 1 && disk_need(fewest, model, saved_steps).total() <= room;
  std::string text = fmt::format(
      "{} are free, but {} checkpoints of {} each and the trained model of {} are still to be written; free some space",
      format_bytes(room), need.checkpoints, format_bytes(need.checkpoint_bytes), format_bytes(need.model_bytes));
  if (!limit_helps) return text;
  text += config.train.save_total_limit == 0 ? ", or set train.save_total_limit, which now keeps all of them"
                                             : ", or lower train.save_total_limit";
  return text;
}

void warn_of_little_room(const RunConfig& config, const ModelConfig& model) {
  const std::filesystem::path& path = config.train.output_dir;
  std::error_code failed;
  const std::filesystem::space_info room = std::filesystem::space(path, failed);
  if (failed) return;
  const std::string advice =
      advice_on_room(config, model, checkpoint_steps(path), static_cast<int64_t>(room.available));
  if (!advice.empty()) log::warning("train.output_dir {}: {}", path.string(), advice);
}

void make_room_for_checkpoint(const RunConfig& config, const ModelConfig& model, int64_t last_good) {
  const std::filesystem::path& path = config.train.output_dir;
  const int64_t limit = config.train.save_total_limit;
  const std::vector<int64_t> steps = checkpoint_steps(path);
  std::error_code failed;
  const std::filesystem::space_info room = std::filesystem::space(path, failed);
  if (failed || limit <= 1 || std::ssize(steps) < limit) return;
  const int64_t needed = std::max(checkpoint_bytes(config, model), occupied_bytes(checkpoint_path(path, steps.back())));
  if (static_cast<int64_t>(room.available) >= needed) return;
  log::info("{} are free and a checkpoint takes {}: deleting the oldest one before the new one is saved",
            format_bytes(static_cast<int64_t>(room.available)), format_bytes(needed));
  remove_old_checkpoints(path, steps.back(), limit - 1, last_good);
}

}  // namespace sb
