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
  // Needs the reduced gradients of the own pieces. Afterwards all ranks read the same values. step.weight_decay is for
  // the parameters that decay.
  void update(const Exec& exec, const AdamWStep& step);

  // The own shard's values, where the parameters have none; empty otherwise.
  TensorView values() const { return host_ ? host_->values() : values_; }
  // The own shard's moments.
  TensorView first_moment() const { return host_ ? host_->first_moment() : first_moment_; }
  TensorView second_moment() const { return host_ ? host_->second_moment() : second_moment_; }

 private:
  void take_values(const TensorView& all);
  // Of elements [begin, end) of the flat buffers, whose values and moments are given.
  void update_range(const Exec& exec, const AdamWStep& step, const FlatRange& range, const TensorView& values,
                    const TensorView& first_moment, const TensorView& second_moment) const;

  ParameterSet& parameters_;
  const ShardLayout& layout_;
  Communicator& replicas_;
  std::unique_ptr<HostOptimizerState> host_;  // null: what follows is on the device
  Arena arena_;
  TensorView values_, first_moment_, second_moment_;
  std::vector<DecayRange> tensors_;  // ascending; the padding between them is zero and stays zero
};

}  // namespace sb
