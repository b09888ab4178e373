#include "parallel/weight_gather.h"

namespace sb {

void WeightGather::begin(const Exec& exec, const TensorView& all, const FlatRange& range) {
  const int64_t bytes = range.size() / replicas_.size() * dtype_bytes(all.dtype());
  under_way_.push_back(
      {range, replicas_.all_gather_async(all.rows(range.begin, range.end).raw(), bytes, CommType::u8), exec});
}

void WeightGather::await(const FlatRange& range) {
  const auto wanted = [&](const Bucket& bucket) {
    return bucket.range.begin < range.end && range.begin < bucket.range.end;
  };
  for (Bucket& bucket : under_way_) {
    if (!wanted(bucket)) continue;
    Wait wait{DeviceEvent(bucket.exec.device), DeviceEvent(bucket.exec.device)};
    wait.begin.record(bucket.exec);
    bucket.request.wait();
    wait.end.record(bucket.exec);
    waits_.push_back(std::move(wait));
  }
  std::erase_if(under_way_, wanted);
}

}  // namespace sb
