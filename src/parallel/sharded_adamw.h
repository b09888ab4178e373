#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "core/arena.h"
#include "device/exec.h"
#include "model/parameters.h"
#include "ops/adamw.h"
#include "parallel/shard_layout.h"

namespace sb {

// AdamW whose moments are spread over the replicas of a stage (ZeRO-1): each rank updates its own pieces and gathers
// the others'. Where the operations read rounded weights these are gathered, and the fp32 values of the other ranks'
// pieces are out of date from the first update on.
class ShardedAdamW {
 public:
  ShardedAdamW(ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas);

  // What the constructor will allocate.
  static int64_t bytes(int64_t flat_elements, int shards);

  // Σ gradient² over this rank's pieces, in fp64. `left_out`: a bucket that another rank counts; -1: none.
  double squared_norm(const Exec& exec, int left_out) const;
  // Needs the reduced gradients of the own pieces. Afterwards all ranks read the same values. step.weight_decay is for
  // the parameters that decay.
  void update(const Exec& exec, const AdamWStep& step);

  // The own shard's moments.
  TensorView first_moment() const { return first_moment_; }
  TensorView second_moment() const { return second_moment_; }

 private:
  ParameterSet& parameters_;
  const ShardLayout& layout_;
  Communicator& replicas_;
  Arena arena_;
  TensorView first_moment_, second_moment_;
  std::vector<DecayRange> decay_ranges_;
};

}  // namespace sb
