#include "run/checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/errors.h"
#include "core/files/regular_file.h"
#include "core/log.h"
#include "core/memory_plan.h"
#include "model/hf_checkpoint.h"
#include "run/checkpoint/manifest.h"
#include "run/checkpoint/new_directory.h"
#include "run/checkpoint/optimizer_files.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "checkpoint-";

nlohmann::json read_json(const fs::path& file) {
  nlohmann::json object = nlohmann::json::parse(read_regular_file(file), nullptr, /*allow_exceptions=*/false);
  SB_USER_CHECK(object.is_object(), "{}: not a JSON object", file.string());
  return object;
}

// Whether its sizes are those of the manifest, as far as that can be seen.
bool looks_complete(const fs::path& checkpoint) {
  try {
    return !compare_with_manifest(checkpoint, /*checksums=*/false);
  } catch (const UnreadableFile&) {
    return false;
  }
}

}  // namespace

fs::path checkpoint_path(const fs::path& output_dir, int64_t step) {
  return output_dir / fmt::format("{}{}", kPrefix, step);
}

std::vector<int64_t> checkpoint_steps(const fs::path& output_dir) {
  std::vector<int64_t> steps;
  if (!fs::exists(output_dir)) return steps;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    int64_t step = 0;
    const char *begin = name.data() + kPrefix.size(), *end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(begin, end, step);
    if (error == std::errc() && rest == end && begin != end) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string previous_checkpoint_note(const fs::path& output_dir) {
  const std::vector<int64_t> steps = checkpoint_steps(output_dir);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const fs::path path = checkpoint_path(output_dir, *step);
    if (looks_complete(path)) return fmt::format("{} is intact, and the same command resumes from it", path.string());
  }
  return "there is no earlier checkpoint";
}

void remove_old_checkpoints(const fs::path& output_dir, int64_t newest, int64_t keep, int64_t last_good) {
  if (keep <= 0) return;
  const std::vector<int64_t> steps = checkpoint_steps(output_dir);
  int64_t complete = 0;
  bool good_one_kept = false;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (*step > newest) continue;
    const fs::path path = checkpoint_path(output_dir, *step);
    if (!looks_complete(path)) continue;
    const bool newest_good = *step <= last_good && !good_one_kept;
    good_one_kept |= newest_good;
    if (++complete <= keep || newest_good) continue;
    try {
      remove_directory(path);
    } catch (const fs::filesystem_error& error) {
      log::warning("{} could not be removed: {}", path.string(), error.what());  // no reason to end a run
    }
  }
}

std::optional<std::string> find_damage(const fs::path& checkpoint, FileShare share) {
  // Silence would look like a program that hangs.
  constexpr uintmax_t kTakesAWhile = uintmax_t{1} << 30;
  uintmax_t bytes = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(checkpoint, ignored))
    if (entry.is_regular_file(ignored)) bytes += entry.file_size(ignored);
  if (bytes >= kTakesAWhile && share.part == 0)
    log::info("verifying the checksums of {} ({})", checkpoint.string(), format_bytes(static_cast<int64_t>(bytes)));
  return compare_with_manifest(checkpoint, /*checksums=*/true, share);
}

std::optional<fs::path> newest_intact_checkpoint(const fs::path& output_dir, const FindDamage& find) {
  const std::vector<int64_t> steps = checkpoint_steps(output_dir);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const fs::path path = checkpoint_path(output_dir, *step);
    std::optional<std::string> damage;
    try {
      damage = find(path);
    } catch (const UnreadableFile& error) {
      throw UserError(
          "{}. It belongs to the newest checkpoint, which may be intact: make it readable and start again, or move {} "
          "away to resume from an older one",
          error.what(), path.string());
    }
    if (!damage) return path;
    log::warning("skipping {}, which is damaged: {}", path.string(), *damage);
  }
  SB_USER_CHECK(steps.empty(),
                "{}: all {} checkpoints are damaged. Restore one, or start over with another train.output_dir",
                output_dir.string(), steps.size());
  return std::nullopt;
}

TrainState read_train_state(const fs::path& checkpoint) {
  const fs::path file = checkpoint / "state.json";
  const nlohmann::json json = read_json(file);
  TrainState state;
  try {
    state.step = json.at("step");
    state.updates = json.at("updates");
    state.position = json.at("position");
    state.source_state = json.at("source_state");
    state.tokens = json.at("tokens");
    state.skipped = json.at("skipped");
    state.skipped_in_row = json.at("skipped_in_row");
    state.planner_state = json.value("planner_state", "");  // older checkpoints have none of these
    state.source = json.value("source", "");
    state.base = json.value("base", "");
  } catch (const nlohmann::json::exception& error) {
    throw UserError("{}: {}", file.string(), error.what());
  }
  return state;
}

TrainState load_checkpoint(const fs::path& checkpoint, ParameterSet& parameters, const ShardLayout& layout, int shard,
                           TensorView first_moment, TensorView second_moment) {
  read_hf_weights(checkpoint, parameters);
  return load_moments(checkpoint, parameters, layout, shard, first_moment, second_moment);
}

TrainState load_moments(const fs::path& checkpoint, const ParameterSet& parameters, const ShardLayout& layout,
                        int shard, TensorView first_moment, TensorView second_moment) {
  read_optimizer_files(checkpoint, parameters, layout, shard, first_moment, second_moment);
  return read_train_state(checkpoint);
}

}  // namespace sb
