#include "parallel/gradient_reducer.h"

#include <algorithm>

#include "device/memory.h"

namespace sb {

namespace {

// Elements, at most, of a range that is added together with others: an operation of its own would take longer than the
// copies.
constexpr int64_t kShort = 1 << 16;

std::vector<FlatRange> ranges_of(const std::vector<GradientReducer::Shared>& shared) {
  std::vector<FlatRange> ranges;
  for (const GradientReducer::Shared& one : shared) ranges.push_back(one.range);
  return ranges;
}

}  // namespace

int64_t GradientReducer::bytes(std::span<const FlatRange> shared) {
  int64_t bytes = 0;
  for (const FlatRange& range : shared)
    if (range.size() <= kShort) bytes += Arena::rounded(range.size() * int64_t{sizeof(float)});
  return bytes;
}

GradientReducer::GradientReducer(const ParameterSet& parameters, const ShardLayout& layout, Communicator& replicas,
                                 Communicator* ends, int tied_bucket, const std::vector<Shared>& shared)
    : parameters_(parameters),
      layout_(layout),
      replicas_(replicas),
      ends_(ends),
      tied_bucket_(tied_bucket),
      arena_(make_arena("shared gradients", bytes(ranges_of(shared)), parameters.gradients().device())) {
  SB_CHECK(replicas.size() == layout.shards(), "{} replicas, {} shards", replicas.size(), layout.shards());
  for (int bucket = layout.buckets() - 1; bucket >= 0; --bucket) {
    const FlatRange own = layout.piece(bucket, replicas.rank());
    for (const Shared& all : shared) {
      const FlatRange range{std::max(own.begin, all.range.begin), std::min(own.end, all.range.end)};
      if (range.size() <= 0) continue;
      if (all.range.size() > kShort) {
        alone_.push_back({range, all.ranks});
        continue;
      }
      auto found = std::ranges::find(together_, &all.ranks, &Together::ranks);
      if (found == together_.end()) found = together_.insert(found, {&all.ranks, {}, {}});
      found->ranges.push_back(range);
    }
  }
  for (Together& one : together_) {
    int64_t elements = 0;
    for (const FlatRange& range : one.ranges) elements += range.size();
    one.sums = arena_.allocate(DType::f32, {elements});
  }
}

void GradientReducer::copy(const Exec& exec, bool back) const {
  for (const Together& one : together_) {
    int64_t begin = 0;
    for (const FlatRange& range : one.ranges) {
      const TensorView gradients = parameters_.gradients().rows(range.begin, range.end),
                       sums = one.sums.rows(begin, begin + range.size());
      copy_tensor(exec, back ? sums : gradients, back ? gradients : sums);
      begin += range.size();
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

void GradientReducer::finish(const Exec& exec) {
  SB_CHECK(next_bucket_ == -1, "bucket {} was never complete", next_bucket_);
  const auto wait = [&] {
    for (CommRequest& request : requests_) request.wait();
    requests_.clear();
  };
  wait();
  // After the sums over the replicas: a library may add these in another order for every group of them, and copies of
  // an element that each got its own would drift apart.
  copy(exec, /*back=*/false);
  // One group after the other: NCCL does not run two communicators on a device at a time, where the ranks of one may
  // wait for those of the other.
  Communicator* in_flight = nullptr;
  const auto add = [&](Communicator& ranks, float* data, int64_t count) {
    if (in_flight != &ranks) wait();
    in_flight = &ranks;
    requests_.push_back(ranks.all_reduce_async(data, count, CommType::f32, ReduceOp::sum));
  };
  for (const Together& one : together_) add(*one.ranks, one.sums.f32(), one.sums.elements());
  for (const Shared& one : alone_) add(one.ranks, parameters_.gradients().f32() + one.range.begin, one.range.size());
  wait();
  copy(exec, /*back=*/true);
  if (ends_ == nullptr) return;
  // Two summands: the same bits on both ends.
  const FlatRange own = layout_.piece(tied_bucket_, replicas_.rank());
  ends_->all_reduce(std::span(parameters_.gradients().f32() + own.begin, static_cast<size_t>(own.size())));
}

}  // namespace sb
