#include "parallel/gradient_reducer.h"

#include <utility>

namespace sb {

GradientReducer::GradientReducer(const ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas,
                                 Communicator* ends, int tied_bucket, std::vector<Shared> shared)
    : parameters_(parameters),
      layout_(layout),
      replicas_(replicas),
      ends_(ends),
      tied_bucket_(tied_bucket),
      shared_(std::move(shared)) {
  SB_CHECK(replicas.size() == layout.shards(), "{} replicas, {} shards", replicas.size(), layout.shards());
}

void GradientReducer::start() {
  SB_CHECK(requests_.empty(), "the reduction before is not finished");
  next_bucket_ = layout_.buckets() - 1;
}

void GradientReducer::group_final(int group) {
  const int bucket = layout_.bucket_of_group(group);
  SB_CHECK(bucket == next_bucket_, "group {} of bucket {} is final while bucket {} is not complete", group, bucket,
           next_bucket_);
  const ParameterSet::Group& own = parameters_.groups()[static_cast<size_t>(group)];
  for (const Shared& shared : shared_)
    if (own.begin <= shared.range.begin && shared.range.begin < own.end)
      shared.ranks.all_reduce(
          std::span(parameters_.gradients().f32() + shared.range.begin, static_cast<size_t>(shared.range.size())));
  const FlatRange range = layout_.bucket(bucket);
  if (own.begin != range.begin) return;  // not its last group
  --next_bucket_;
  if (replicas_.size() == 1) return;
  requests_.push_back(replicas_.reduce_scatter_async(parameters_.gradients().f32() + range.begin,
                                                     range.size() / layout_.shards(), CommType::f32, ReduceOp::sum));
}

void GradientReducer::finish() {
  SB_CHECK(next_bucket_ == -1, "bucket {} was never complete", next_bucket_);
  for (CommRequest& request : requests_) request.wait();
  requests_.clear();
  if (ends_ == nullptr) return;
  // Two summands: the same bits on both ends.
  const FlatRange own = layout_.piece(tied_bucket_, replicas_.rank());
  ends_->all_reduce(std::span(parameters_.gradients().f32() + own.begin, static_cast<size_t>(own.size())));
}

}  // namespace sb
