#include "run/disk_room.h"

#include <algorithm>
#include <filesystem>

#include "core/log.h"
#include "core/memory_plan.h"
#include "model/stage.h"
#include "run/checkpoint/checkpoint.h"
#include "run/time_left.h"

namespace sb {

DiskNeed disk_need(const RunConfig& config, const ModelConfig& model, const std::vector<int64_t>& saved_steps) {
  StageOptions whole;
  whole.last_layer = model.layers;
  const int64_t parameters = Stage::declare_parameters(model, whole).elements();
  DiskNeed need;
  need.checkpoint_bytes = 3 * parameters * dtype_bytes(DType::f32);
  need.model_bytes = parameters * dtype_bytes(config.model.save_dtype);
  const int64_t done = saved_steps.empty() ? 0 : saved_steps.back();
  need.checkpoints = times_due(done + 1, config.train.save_steps, config.train.max_steps);
  // A new one is complete before the oldest goes.
  if (const int64_t limit = config.train.save_total_limit; limit > 0)
    need.checkpoints = std::min(need.checkpoints, std::max<int64_t>(limit + 1 - std::ssize(saved_steps), 1));
  return need;
}

void warn_of_little_room(const RunConfig& config, const ModelConfig& model) {
  const std::filesystem::path& path = config.train.output_dir;
  std::error_code failed;
  const std::filesystem::space_info room = std::filesystem::space(path, failed);
  const DiskNeed need = disk_need(config, model, checkpoint_steps(path));
  if (failed || static_cast<int64_t>(room.available) >= need.total()) return;
  log::warning(
      "train.output_dir {}: {} are free, but {} checkpoints of {} and the trained model of {} are to come; free some "
      "room, or {}",
      path.string(), format_bytes(static_cast<int64_t>(room.available)), need.checkpoints,
      format_bytes(need.checkpoint_bytes), format_bytes(need.model_bytes),
      config.train.save_total_limit == 0 ? "set train.save_total_limit, which keeps all now"
                                         : "lower train.save_total_limit");
}

}  // namespace sb
