#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "attention/gpu/coverage/coverage.h"
#include "device/event.h"
#include "device/memory.h"

namespace sb::gpu {

// Results of coverage measurements on their way to the host, until somebody asks. They travel through a few pages of
// page-locked memory, which serve again when they have arrived: however much is measured in a step, nothing more is
// taken beside the device.
class CoverageLog {
 public:
  explicit CoverageLog(DeviceKind device = DeviceKind::cuda) : device_(device) {}
  // Takes the pages; otherwise that is done when they are first needed.
  void reserve();
  // Copies the results of one forward in the order of the stream, which is always the same one. Waits only where all
  // pages are on their way.
  void add(const Exec& exec, int layer, const CoveragePlan& plan, const Shape& shape, float* results);
  // Adds everything to a report and starts anew. Waits for the last results.
  void take(AttentionReport& report);

  static constexpr int64_t kPageFloats = 1 << 17, kPages = 8;

 private:
  struct Record {
    int layer;
    int64_t tokens;
    int32_t sampled, points, kv_heads, heads, whole_sampled;
    bool goes_on;   // with the next piece of the sequence
    int64_t begin;  // among the values of all forwards
  };
  struct Page {
    HostMemory memory;
    DeviceEvent copied;
    int64_t used = 0;
  };
  Page& page_with_room();
  void read(Page& page);
  void add_sample(const Record& record, const float* value, AttentionReport& report);

  const DeviceKind device_;
  std::vector<Page> pages_;
  size_t current_ = 0;
  std::vector<float> values_;  // of the pages that were read
  int64_t added_ = 0;          // values in all
  std::vector<Record> records_;
  std::map<int, CoverageSample> begun_;  // of every layer: the pieces so far
};

}  // namespace sb::gpu
