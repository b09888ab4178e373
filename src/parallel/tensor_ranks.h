#pragma once

#include "comm/communicator.h"
#include "model/tensor_parallel/tensor_group.h"

namespace sb {

// The group of a grid that shares a stage's products, over a communicator for the stage's device.
class TensorRanks final : public TensorGroup {
 public:
  explicit TensorRanks(Communicator& ranks) : ranks_(ranks) {}

  TensorShare share() const override { return {ranks_.size(), ranks_.rank()}; }
  CommRequest gather(TensorView all) override;
  CommRequest reduce_scatter(TensorView all) override;

 private:
  Communicator& ranks_;
};

}  // namespace sb
