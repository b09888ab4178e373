#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/random.h"
#include "plan/latency/workload.h"

namespace sb {

// Sequence lengths to plan with when there is no data yet.
std::vector<std::string> named_length_pools();
// One positive integer a line; empty lines and lines that start with # are skipped. UserError names file and line.
std::vector<int64_t> parse_lengths(const std::string& text, const std::string& where);
// A name above or a text file.
std::vector<int64_t> find_lengths(const std::string& name_or_path);

// Draws global batches as an epoch does: all lengths in random order, then again in another.
class LengthSampler {
 public:
  LengthSampler(std::span<const int64_t> pool, uint64_t seed);
  // Ids count up from 0 over all draws.
  std::vector<Sequence> next(int64_t count);

 private:
  std::span<const int64_t> pool_;
  Random random_;
  std::vector<int64_t> order_;
  size_t at_ = 0;
  int64_t drawn_ = 0;
};

}  // namespace sb
