#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "core/files/record_file.h"

namespace sb {

struct Scalar {
  std::string tag;
  double value;
};

// Writes a TensorBoard event file: TFRecords of hand-encoded Event messages, so that nothing needs protobuf.
// The record of a run is metrics.jsonl; this is a picture of it.
class TensorBoardWriter {
 public:
  // Opens a new event file under `directory` (created). A resumed run opens another one and tells TensorBoard that
  // steps from `first_step` on start over, so that what was recorded after the checkpoint disappears from the curves.
  TensorBoardWriter(const std::filesystem::path& directory, int64_t first_step);

  void write(int64_t step, std::span<const Scalar> scalars);
  const std::filesystem::path& file() const { return file_->path(); }

 private:
  void record(const std::string& event);

  std::optional<RecordFile> file_;
};

}  // namespace sb
