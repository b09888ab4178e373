#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

// Lengths between two powers of two, [from, to).
struct LengthClass {
  int64_t from = 0, to = 0;
  int64_t sequences = 0, tokens = 0;
  double attention = 0.0;  // sum of squared lengths: what dense attention costs, up to a factor
};

struct LengthStatistics {
  int64_t sequences = 0, tokens = 0, shortest = 0, longest = 0;
  double mean = 0.0, attention = 0.0;
  struct Quantile {
    double at;
    int64_t length;
  };
  std::vector<Quantile> quantiles;   // the smallest length that at least this share of the sequences does not exceed
  std::vector<LengthClass> classes;  // ascending, without gaps, from the shortest's class to the longest's
};

// `lengths` is not empty; its order does not matter.
LengthStatistics measure_lengths(std::vector<int64_t> lengths);

// A table with bars, `width` columns wide.
std::string format_length_statistics(const LengthStatistics& statistics, int width = 100);
std::string length_statistics_json(const LengthStatistics& statistics);

}  // namespace sb
