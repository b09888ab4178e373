#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/files/file_lock.h"
#include "run/checkpoint/checkpoint.h"
#include "run/config/run_config.h"

namespace sb {

// Every option of a YAML text as "section.key" → value.
std::map<std::string, std::string> flatten_yaml(const std::string& yaml);

struct OptionChange {
  std::string key, before, now;
};
struct RunDifference {
  std::vector<OptionChange> forbidden;  // they make it another run: model, data, batch, attention, seed
  std::vector<OptionChange> allowed;    // a resumed run may have more steps, another learning rate or other threads
};
RunDifference compare_runs(const std::string& before, const std::string& now);

// UserError for a train.output_dir that cannot be made or written to or holds another run, a train.resume that names
// nothing and a balance.replay of the run's own log: what can be told before there is a run, with nothing written.
void check_run_directory(const RunConfig& config);

// The output directory of one run:
//   run.yaml          the resolved configuration
//   metrics.jsonl     the record; tensorboard/ the same as event files; trace.json, trace-2.json … on request
//   checkpoint-<n>/   see run/checkpoint/checkpoint.h
//   final/            the trained model, as `transformers` loads it
// Opening it locks it against a second process, refuses one that holds another run, decides where to start and takes
// the plans out of plan.jsonl that were made by other settings.
class RunDirectory {
 public:
  // `find`: says what is wrong with a checkpoint.
  explicit RunDirectory(const RunConfig& config, const FindDamage& find = kFindAllDamage);
  // For the other ranks of a run: the directory that rank 0 has opened, with what it decided.
  RunDirectory(const RunConfig& config, std::optional<std::filesystem::path> resume_from);
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // The checkpoint to go on from; nothing: start from the beginning.
  const std::optional<std::filesystem::path>& resume_from() const { return resume_from_; }

 private:
  void compare_with_other_run(const RunConfig& config) const;

  std::filesystem::path path_;
  std::optional<std::filesystem::path> resume_from_;
  std::optional<FileLock> lock_;  // rank 0's
};

}  // namespace sb
