#include "parallel/shard_layout.h"

#include <algorithm>

namespace sb {

ShardLayout::ShardLayout(const ParameterSet& parameters, int shards, int64_t bucket_elements, int alone)
    : shards_(shards), flat_elements_(parameters.flat_elements()), bucket_of_group_(parameters.groups().size()) {
  SB_CHECK(shards > 0 && !parameters.groups().empty() && parameters.groups().back().end == flat_elements_,
           "{} shards, {} groups", shards, parameters.groups().size());
  // From the last group to the first, as backward finishes them: the last bucket is full first.
  const auto count = static_cast<int>(parameters.groups().size());
  bool closed = true;
  for (int i = count - 1; i >= 0; --i) {
    const ParameterSet::Group& group = parameters.groups()[static_cast<size_t>(i)];
    SB_CHECK((group.end - group.begin) % shards == 0, "group {} of {} elements does not divide into {} shards", i,
             group.end - group.begin, shards);
    if (closed || i == alone) buckets_.push_back({group.end, group.end});
    buckets_.back().begin = group.begin;
    bucket_of_group_[static_cast<size_t>(i)] = static_cast<int>(buckets_.size()) - 1;
    closed = i == alone || buckets_.back().size() >= bucket_elements;
  }
  std::reverse(buckets_.begin(), buckets_.end());
  for (int& bucket : bucket_of_group_) bucket = buckets() - 1 - bucket;
}

FlatRange ShardLayout::piece(int bucket, int shard) const {
  const FlatRange whole = this->bucket(bucket);
  const int64_t size = whole.size() / shards_;
  return {whole.begin + shard * size, whole.begin + (shard + 1) * size};
}

std::vector<FlatRange> ShardLayout::pieces(int shard, int left_out) const {
  std::vector<FlatRange> joined;
  for (int i = 0; i < buckets(); ++i) {
    if (i == left_out) continue;
    const FlatRange next = piece(i, shard);
    if (!joined.empty() && joined.back().end == next.begin)
      joined.back().end = next.end;
    else
      joined.push_back(next);
  }
  return joined;
}

std::vector<ShardLayout::Segment> ShardLayout::segments(const FlatRange& range) const {
  std::vector<Segment> found;
  for (int i = 0; i < buckets(); ++i) {
    for (int shard = 0; shard < shards_; ++shard) {
      const FlatRange own = piece(i, shard);
      const FlatRange common{std::max(own.begin, range.begin), std::min(own.end, range.end)};
      if (common.size() > 0) found.push_back({shard, place(i) + common.begin - own.begin, common});
    }
  }
  return found;
}

}  // namespace sb
