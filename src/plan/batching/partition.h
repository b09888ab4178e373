#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sb {

// Items into bins so that the heaviest bin is as light as possible.
struct PartitionProblem {
  std::vector<double> weight;   // microseconds, or whatever is balanced; positive
  std::vector<int64_t> tokens;  // what the cap counts
  int bins = 1;
  int64_t cap = 0;    // most tokens a bin may hold; 0: no limit
  int max_items = 0;  // most items a bin may hold; 0: no limit
  int min_items = 1;  // fewest items a bin must hold
};

// bin[i] of every item; empty when no assignment was found.
using Assignment = std::vector<int>;

// No assignment has a lighter heaviest bin: mean load, heaviest item, and items that must share a bin.
double partition_lower_bound(std::span<const double> weight, int bins);
// No fewer bins of `cap` hold these tokens, whatever the weights (Martello and Toth's L2).
int64_t fewest_bins(std::vector<int64_t> tokens, int64_t cap);
double heaviest_bin(const PartitionProblem& problem, const Assignment& assignment);
bool respects_limits(const PartitionProblem& problem, const Assignment& assignment);

// Longest first into the least loaded bin that has room; items of equal weight in the order given. Where the weights
// leave an item without room, tokens are packed first (best fit) and weights balanced by improve().
Assignment longest_first(const PartitionProblem& problem);
// Karmarkar–Karp differencing; ignores cap and max_items, leaves no bin empty.
Assignment karmarkar_karp(const PartitionProblem& problem);
// Lowers the heaviest bin by moves, swaps and best re-splits of pairs of bins, at most `trials` of them.
void improve_partition(const PartitionProblem& problem, Assignment& assignment, int64_t trials);
// The optimum; for up to kExactItems items.
inline constexpr int kExactItems = 12;
Assignment exact_partition(const PartitionProblem& problem);
// exact when small, otherwise longest_first and improve.
Assignment balanced_partition(const PartitionProblem& problem, int64_t trials);

}  // namespace sb
