#pragma once

#include <map>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "attention/gpu/plan/device_plan.h"

namespace sb::gpu {

// Results of coverage measurements on their way to the host: they stay in device memory until somebody asks.
class CoverageLog {
 public:
  // Takes what most steps need; one that needs more takes it then.
  void reserve();
  static int64_t reserved_bytes();
  // Room for the results of one forward.
  float* add(int layer, const CoveragePlan& plan, const Shape& shape);
  // Adds everything to a report and starts anew. Waits for the device.
  void take(AttentionReport& report);

 private:
  struct Record {
    int layer;
    int64_t tokens;
    int32_t sampled, points, kv_heads, heads, whole_sampled;
    bool goes_on;  // with the next piece of the sequence
    size_t piece;
    int64_t begin;  // float
  };
  struct Piece {
    DeviceBuffer memory;
    int64_t floats = 0, used = 0;
  };
  Piece& add_piece(int64_t floats);

  void add_sample(const Record& record, const float* value, AttentionReport& report);

  std::vector<Record> records_;
  std::map<int, CoverageSample> begun_;  // of every layer: the pieces so far
  std::vector<Piece> pieces_;
};

}  // namespace sb::gpu
