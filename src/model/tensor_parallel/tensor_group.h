#pragma once

#include "comm/communicator.h"
#include "core/tensor.h"
#include "model/tensor_parallel/tensor_share.h"

namespace sb {

// The ranks of a tensor-parallel group as a stage sees them. All of them begin the same operations in the same order
// with equal shapes. An operation begins when what was queued before it is done, and its rows are nobody else's until
// the request was waited for: what is queued after that sees the result, what is queued in between runs beside it.
class TensorGroup {
 public:
  virtual ~TensorGroup() = default;

  virtual TensorShare share() const = 0;
  // `all` [ranks · rows, …] has this rank's rows (number `rank` of the equal parts) and gets those of the others.
  virtual CommRequest gather(TensorView all) = 0;
  // The sum of `all` over the ranks, of which this rank's part alone is wanted; the others are undefined afterwards.
  virtual CommRequest reduce_scatter(TensorView all) = 0;
};

}  // namespace sb
