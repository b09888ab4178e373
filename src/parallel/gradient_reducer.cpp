#include "parallel/gradient_reducer.h"

#include <algorithm>

namespace sb {

GradientReducer::GradientReducer(const ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas,
                                 Communicator* ends, int tied_bucket, const std::vector<Shared>& shared)
    : parameters_(parameters), layout_(layout), replicas_(replicas), ends_(ends), tied_bucket_(tied_bucket) {
  SB_CHECK(replicas.size() == layout.shards(), "{} replicas, {} shards", replicas.size(), layout.shards());
  for (int bucket = layout.buckets() - 1; bucket >= 0; --bucket) {
    const FlatRange own = layout.piece(bucket, replicas.rank());
    for (const Shared& all : shared) {
      const FlatRange range{std::max(own.begin, all.range.begin), std::min(own.end, all.range.end)};
      if (range.size() > 0) shared_.push_back({range, all.ranks});
    }
  }
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
  const FlatRange range = layout_.bucket(bucket);
  if (own.begin != range.begin) return;  // not its last group
  --next_bucket_;
  if (replicas_.size() == 1) return;
  requests_.push_back(replicas_.reduce_scatter_async(parameters_.gradients().f32() + range.begin,
                                                     range.size() / layout_.shards(), CommType::f32, ReduceOp::sum));
}

void GradientReducer::finish() {
  SB_CHECK(next_bucket_ == -1, "bucket {} was never complete", next_bucket_);
  const auto wait = [&] {
    for (CommRequest& request : requests_) request.wait();
    requests_.clear();
  };
  wait();
  // After the sums over the replicas: a library may add these in another order for every group of them, and copies of
  // an element that each got its own would drift apart.
  for (const Shared& shared : shared_)
    requests_.push_back(shared.ranks.all_reduce_async(parameters_.gradients().f32() + shared.range.begin,
                                                      shared.range.size(), CommType::f32, ReduceOp::sum));
  wait();
  if (ends_ == nullptr) return;
  // Two summands: the same bits on both ends.
  const FlatRange own = layout_.piece(tied_bucket_, replicas_.rank());
  ends_->all_reduce(std::span(parameters_.gradients().f32() + own.begin, static_cast<size_t>(own.size())));
}

}  // namespace sb
