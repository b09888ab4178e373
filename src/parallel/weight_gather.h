#pragma once

#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/tensor.h"
#include "device/event.h"
#include "device/exec.h"
#include "parallel/shard_layout.h"

namespace sb {

// Updated weights on their way from the replicas that have them to the others: in place, bucket by bucket, in the order
// in which a forward reads them, while it runs. Who reads or writes some of them waits for these alone.
class WeightGather {
 public:
  // What had been queued had to wait for a bucket from then to then.
  struct Wait {
    DeviceEvent begin, end;
  };

  explicit WeightGather(Communicator& replicas) : replicas_(replicas) {}

  // Of `all`, elements `range`, of which every replica has updated its own piece. Ranges ascend, and none is on its way
  // already. `exec`: of those who will wait.
  void begin(const Exec& exec, const TensorView& all, const FlatRange& range);
  // Before elements of `range` are read or written.
  void await(const FlatRange& range);
  // The waits since the last call.
  std::vector<Wait> take_waits() { return std::exchange(waits_, {}); }

 private:
  struct Bucket {
    FlatRange range;
    CommRequest request;
    Exec exec;
  };

  Communicator& replicas_;
  std::vector<Bucket> under_way_;
  std::vector<Wait> waits_;
};

}  // namespace sb
