#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "core/arena.h"
#include "device/exec.h"
#include "model/parameters.h"
#include "ops/adamw.h"
#include "parallel/host_optimizer_state.h"
#include "parallel/shard_layout.h"
#include "parallel/weight_gather.h"

namespace sb {

// AdamW whose moments are spread over the replicas of a stage (ZeRO-1): each rank updates its own pieces and gathers
// the others'. Where the parameters leave their values to others, because the operations read rounded weights, the fp32
// values are spread like the moments, and the weights are gathered.
class ShardedAdamW {
 public:
  struct Storage {
    bool on_host = false;        // these values and the moments wait in host memory
    DType moments = DType::f32;  // or bf16
  };
  ShardedAdamW(ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas, const Storage& storage);

  // What the constructor will allocate on the device; `with_values`: the parameters have them.
  static int64_t bytes(int64_t flat_elements, int shards, bool with_values, const Storage& storage);

  // Σ gradient² over this rank's pieces, in fp64. `left_out`: a bucket that another rank counts; -1: none.
  // `not_counted`: ascending ranges of the flat buffers that another rank counts, too.
  double squared_norm(const Exec& exec, int left_out, std::span<const FlatRange> not_counted = {}) const;
  // Needs the reduced gradients of the own pieces. Afterwards all ranks read the same values; those of others may still
  // be on their way, and whoever reads them through the parameters waits for what he reads. step.weight_decay is for
  // the parameters that decay.
  void update(const Exec& exec, const AdamWStep& step);
  // For all of them.
  void await_weights() { gather_.await({0, parameters_.flat_elements()}); }
  // What was waited for since the last call.
  std::vector<WeightGather::Wait> take_waits() { return gather_.take_waits(); }

  // The own shard's values, where the parameters have none; empty otherwise.
  TensorView values() const { return host_ ? host_->values() : values_; }
  // The own shard's moments.
  TensorView first_moment() const { return host_ ? host_->first_moment() : first_moment_; }
  TensorView second_moment() const { return host_ ? host_->second_moment() : second_moment_; }

 private:
  void take_values(const TensorView& all);
  // Of elements `range` of the flat buffers, whose values and moments, and rounded weights where there are any, are
  // given.
  struct Elements {
    FlatRange range;
    TensorView values, first_moment, second_moment, weights;
  };
  void update(const Exec& exec, const AdamWStep& step, const Elements& elements) const;

  ParameterSet& parameters_;
  const ShardLayout& layout_;
  Communicator& replicas_;
  std::unique_ptr<HostOptimizerState> host_;  // null: what follows is on the device
  Arena arena_;
  TensorView values_, first_moment_, second_moment_;
  WeightGather gather_;
  std::vector<DecayRange> tensors_;  // ascending; the padding between them is zero and stays zero
};

}  // namespace sb
