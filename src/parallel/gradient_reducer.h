#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "core/arena.h"
#include "device/exec.h"
#include "model/parameters.h"
#include "parallel/shard_layout.h"

namespace sb {

// Adds the gradients of all replicas of a stage, bucket by bucket while the last backward of a step still runs: of each
// bucket every rank ends up with the sum in its own piece; the other pieces are undefined.
class GradientReducer {
 public:
  // Elements that the ranks of a group, which share the products of a stage and cut it alike, have alike: what each
  // computed of their gradient is added, and all get the same bits.
  struct Shared {
    FlatRange range;
    Communicator& ranks;
  };
  // Bytes that the constructor takes: short ranges of them are added together, in memory of their own.
  static int64_t bytes(std::span<const FlatRange> shared);
  // `ends`: the other end of the pipeline holds the bucket `tied_bucket` too, and their sums are added; nullptr: no.
  GradientReducer(const ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas, Communicator* ends,
                  int tied_bucket, const std::vector<Shared>& shared = {});

  // Before the last backward of a step; then every group once, in the order backward reports them.
  void start();
  void group_final(int group);
  // Waits for all of it.
  void finish(const Exec& exec);

 private:
  // Copies between the gradients and where ranges are added together.
  void copy(const Exec& exec, bool back) const;

  const ParameterSet& parameters_;
  const ShardLayout& layout_;
  Communicator& replicas_;
  Communicator* ends_;
  int tied_bucket_;
  Arena arena_;
  // What of the shared elements is in this rank's pieces: short ranges by their ranks, and each of the others.
  struct Together {
    Communicator* ranks;
    std::vector<FlatRange> ranges;
    TensorView sums;
  };
  std::vector<Together> together_;
  std::vector<Shared> alone_;
  int next_bucket_ = -1;               // the one to be completed next, from the last to the first
  std::vector<CommRequest> requests_;  // in the order they were started
};

}  // namespace sb
