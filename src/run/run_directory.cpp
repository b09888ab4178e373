#include "run/run_directory.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/config/config_value.h"
#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/log.h"
#include "plan/planner/plan_log.h"
#include "run/checkpoint/new_directory.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// What a resumed run may change without becoming another run. Everything else decides which numbers are computed.
constexpr std::array<std::string_view, 12> kMayChange = {"train.",
                                                         "optimizer.",
                                                         "balance.",
                                                         "parallel.",
                                                         "device",
                                                         "batch.micro_batch_",
                                                         "data.validation",
                                                         "model.save_dtype",
                                                         "lora.merged",
                                                         "attention.coverage_rows",
                                                         "attention.dump_index",
                                                         "attention.layer_metrics"};

bool may_change(std::string_view key) {
  if (key == "train.seed") return false;
  return std::any_of(kMayChange.begin(), kMayChange.end(), [&](std::string_view p) { return key.starts_with(p); });
}

std::string text_of(const ConfigValue& value) {
  switch (value.kind) {
    case ConfigValue::Kind::null:
      return "";
    case ConfigValue::Kind::scalar:
      return value.text;
    case ConfigValue::Kind::list: {
      std::vector<std::string> items;
      for (const ConfigValue& item : value.items) items.push_back(text_of(item));
      return fmt::format("[{}]", fmt::join(items, ", "));
    }
    case ConfigValue::Kind::map: {
      std::vector<std::string> entries;
      for (const auto& [key, entry] : value.entries) entries.push_back(fmt::format("{}: {}", key, text_of(entry)));
      return fmt::format("{{{}}}", fmt::join(entries, ", "));
    }
  }
  return "";
}

void flatten(const ConfigValue& value, const std::string& prefix, std::map<std::string, std::string>& into) {
  if (value.kind != ConfigValue::Kind::map) {
    into[prefix] = text_of(value);
    return;
  }
  for (const auto& [key, entry] : value.entries) flatten(entry, prefix.empty() ? key : prefix + "." + key, into);
}

// What steps are planned by and was otherwise before, in words; empty: nothing.
std::string changed_planning(const std::vector<OptionChange>& changes) {
  std::vector<std::string> texts;
  for (const OptionChange& change : changes)
    if (change.key.starts_with("balance.") || change.key.starts_with("batch.micro_batch_"))
      texts.push_back(fmt::format("{} was {} and is now {}", change.key, change.before, change.now));
  return fmt::format("{}", fmt::join(texts, ", "));
}

void take_out_plans(const fs::path& log, int64_t first, const std::string& why) {
  if (!fs::exists(log)) return;
  RecordedPlans plans(log, first);
  if (plans.empty() || plans.last() < first) return;
  log::info("{}: steps from {} on are planned again, because {}", log.string(), first, why);
  plans.forget_from(first);
  plans.trim_file(first);
}

}  // namespace

std::map<std::string, std::string> flatten_yaml(const std::string& yaml) {
  std::map<std::string, std::string> options;
  flatten(parse_config(yaml, "run.yaml"), "", options);
  return options;
}

RunDifference compare_runs(const std::string& before, const std::string& now) {
  const auto old_options = flatten_yaml(before), new_options = flatten_yaml(now);
  RunDifference difference;
  const auto note = [&](const std::string& key, const std::string& was, const std::string& is) {
    (may_change(key) ? difference.allowed : difference.forbidden).push_back({key, was, is});
  };
  for (const auto& [key, value] : new_options) {
    const auto old = old_options.find(key);
    if (old == old_options.end())
      note(key, "not set", value);
    else if (old->second != value)
      note(key, old->second, value);
  }
  for (const auto& [key, value] : old_options)
    if (!new_options.contains(key)) note(key, value, "not set");
  return difference;
}

namespace {

// A run.yaml alone, or with the plan of the first step, is of an attempt that failed before that was done.
bool holds_run(const fs::path& directory) {
  const fs::path metrics = directory / "metrics.jsonl";
  return (fs::exists(metrics) && fs::file_size(metrics) > 0) || fs::exists(directory / "final") ||
         !checkpoint_steps(directory).empty();
}

// Returns what the run goes on with otherwise than it began.
std::vector<OptionChange> refuse_another_run(const RunConfig& config) {
  const fs::path& directory = config.train.output_dir;
  const std::vector<int64_t> steps = checkpoint_steps(directory);
  const std::string& resume = config.train.resume;
  SB_USER_CHECK(resume != "never",
                "{} already holds a run and train.resume is never: choose another train.output_dir, or train.resume: "
                "auto to resume it",
                directory.string());
  SB_USER_CHECK(fs::exists(directory / "run.yaml"),
                "{} holds the files of a run, but no run.yaml to tell which: choose another train.output_dir",
                directory.string());

  // Loaded and printed, not as it stands: options that its version did not know yet have their defaults.
  const std::string before = print_run_config(load_run_config(directory / "run.yaml"));
  const RunDifference difference = compare_runs(before, print_run_config(config));
  if (!difference.forbidden.empty()) {
    std::string changes;
    for (const OptionChange& change : difference.forbidden)
      changes += fmt::format("\n  {}: {} there, {} here", change.key, change.before, change.now);
    throw UserError(
        "{} already holds another run:{}\nChoose another train.output_dir (train.resume may name a "
        "checkpoint of this one to start from)",
        directory.string(), changes);
  }
  if (resume != "auto") {
    // Otherwise the next automatic resume would find a checkpoint of the abandoned branch.
    const auto place = [](const fs::path& path) {
      const fs::path normal = fs::weakly_canonical(fs::absolute(path));
      return normal.has_filename() ? normal : normal.parent_path();  // shells complete with a slash at the end
    };
    SB_USER_CHECK(
        steps.empty() || place(checkpoint_path(directory, steps.back())) == place(resume),
        "train.resume names {} but {} also holds checkpoint-{}: move it away (and others newer than yours), or "
        "choose another train.output_dir",
        resume, directory.string(), steps.back());
  }
  return difference.allowed;
}

}  // namespace

void check_run_directory(const RunConfig& config) {
  const std::string& resume = config.train.resume;
  std::error_code failed;
  SB_USER_CHECK(resume == "auto" || resume == "never" || fs::is_directory(resume, failed),
                "train.resume: {} is neither auto, never nor the directory of a checkpoint", resume);
  fs::path there = fs::absolute(config.train.output_dir);
  while (!fs::exists(there, failed) && there.has_relative_path()) there = there.parent_path();
  SB_USER_CHECK(fs::is_directory(there, failed), "train.output_dir {}: cannot be created: {} is not a directory",
                config.train.output_dir.string(), there.string());
  SB_USER_CHECK(::faccessat(AT_FDCWD, there.c_str(), W_OK | X_OK, AT_EACCESS) == 0,
                "train.output_dir {}: {} cannot be written to: {}", config.train.output_dir.string(), there.string(),
                std::strerror(errno));
  if (holds_run(config.train.output_dir)) refuse_another_run(config);
  // Plans are read again when their step comes, which no pipe allows.
  const fs::path& replay = config.balance.replay;
  SB_USER_CHECK(replay.empty() || !fs::exists(replay, failed) || fs::is_regular_file(replay, failed),
                "balance.replay: {} is not a file; name the plan.jsonl itself, not a directory or a pipe",
                replay.string());
  // Its plans would be taken out of the file as the run begins, and be gone when it ends early.
  SB_USER_CHECK(!fs::equivalent(replay, config.train.output_dir / "plan.jsonl", failed),
                "balance.replay: {} is this run's own log, whose plans a resumed run reuses by itself; remove it, or "
                "name a copy of the file",
                replay.string());
}

RunDirectory::RunDirectory(const RunConfig& config, const FindDamage& find) : path_(config.train.output_dir) {
  check_run_directory(config);
  std::error_code failed;
  fs::create_directories(path_, failed);
  SB_USER_CHECK(!failed, "train.output_dir {}: cannot be created: {}", path_.string(), failed.message());
  lock_.emplace(path_ / ".lock",
                fmt::format("{}: another process is training there; wait for it, stop it, or choose another "
                            "train.output_dir",
                            path_.string()));
  const std::string& resume = config.train.resume;
  const bool goes_on = holds_run(path_);  // asked again, now that no other process can change it
  const std::vector<OptionChange> changes = goes_on ? refuse_another_run(config) : std::vector<OptionChange>();
  remove_leftovers(path_);
  if (resume == "auto") {
    resume_from_ = newest_intact_checkpoint(path_, find);
  } else if (resume != "never") {
    SB_USER_CHECK(!holds_run(resume), "train.resume: {} is the directory of a run; name one of its checkpoints",
                  resume);
    const std::optional<std::string> damage = find(resume);
    SB_USER_CHECK(!damage, "train.resume: {} is not an intact checkpoint: {}", resume, *damage);
    resume_from_ = resume;
    compare_with_other_run(config);
  }
  for (const OptionChange& change : changes)
    log::info("{} with {}: {} (was {})", resume_from_ ? "resumed" : "started again", change.key, change.now,
              change.before);
  // Before run.yaml has the new settings: with them there, no later start would see that the plans are of others.
  const std::string outdated = goes_on ? changed_planning(changes) : "no step of the run was finished";
  const auto next_step = [&] { return (resume_from_ ? read_train_state(*resume_from_).step : 0) + 1; };
  if (!outdated.empty()) take_out_plans(path_ / "plan.jsonl", goes_on ? next_step() : 1, outdated);
  replace_file(path_ / "run.yaml", print_run_config(config));
}

RunDirectory::RunDirectory(const RunConfig& config, std::optional<fs::path> resume_from)
    : path_(config.train.output_dir), resume_from_(std::move(resume_from)) {}

// A checkpoint of another directory may be of another run, which is what train.resume is for; what differs is said.
void RunDirectory::compare_with_other_run(const RunConfig& config) const {
  std::error_code ignored;
  if (fs::equivalent(fs::canonical(*resume_from_, ignored).parent_path(), path_, ignored)) return;
  RunDifference difference;
  try {
    difference = compare_runs(print_run_config(load_run_config(*resume_from_ / "run.yaml")), print_run_config(config));
  } catch (const UserError& error) {
    log::warning("train.resume {}: cannot tell what it was trained with: {}", resume_from_->string(), error.what());
    return;
  }
  for (const OptionChange& change : difference.allowed)
    if (change.key != "train.output_dir" && change.key != "train.resume")
      log::info("resumed with {}: {} (was {})", change.key, change.now, change.before);
  for (const OptionChange& change : difference.forbidden) {
    const bool order = change.key == "train.seed" || change.key.starts_with("data.");
    log::warning(
        "train.resume {}: {} was {} there and is {} here{}", resume_from_->string(), change.key, change.before,
        change.now,
        order ? ": its position in the data refers to a different order, so sequences may be repeated or skipped" : "");
  }
}

}  // namespace sb
