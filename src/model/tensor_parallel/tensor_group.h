#pragma once

#include "device/exec.h"
#include "model/tensor_parallel/tensor_share.h"

namespace sb {

// The ranks of a tensor-parallel group as a stage sees them. All of them call the same operations in the same order
// with equal shapes; what is queued after one sees its result.
class TensorGroup {
 public:
  virtual ~TensorGroup() = default;

  virtual TensorShare share() const = 0;
  // `all` [ranks · rows, …] has this rank's rows (number `rank` of the equal parts) and gets those of the others.
  virtual void gather(const Exec& exec, TensorView all) = 0;
  // The sum of `all` over the ranks, of which this rank's part alone is wanted; the others are undefined afterwards.
  virtual void reduce_scatter(const Exec& exec, TensorView all) = 0;
};

}  // namespace sb
