#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "core/files/record_file.h"
#include "core/metric.h"

namespace sb {

// metrics.jsonl, the record of a run: one object a step, and validation objects. Every line is flushed, so that a
// killed run has lost nothing but the line in progress.
class MetricsLog {
 public:
  // Opens the file to append. Lines of steps after `last_step` (written between the checkpoint and the end of the
  // previous process) and an unfinished last line are taken out first: the file has every step once.
  // A file that cannot be read is refused: what could be read of it would take its place.
  MetricsLog(const std::filesystem::path& file, int64_t last_step);

  void write(const std::vector<Metric>& metrics);
  // Of the lines that were there: the last step that was validated; -1: none.
  int64_t last_validation() const { return last_validation_; }

 private:
  int64_t last_validation_ = -1;
  std::optional<RecordFile> file_;
};

}  // namespace sb
