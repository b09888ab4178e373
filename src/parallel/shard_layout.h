#pragma once

#include <cstdint>
#include <vector>

#include "model/parameters.h"

namespace sb {

// Elements of the flat parameter buffers.
struct FlatRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const FlatRange&) const = default;
};

// How the flat buffers of a stage are cut. A bucket is one or more neighbouring groups that are reduced together; each
// bucket is cut into one equal piece a shard. A shard's own buffers (the moments) hold its pieces back to back.
class ShardLayout {
 public:
  // Buckets hold at least `bucket_elements` where there are so many. `alone`: a group that shares its bucket with no
  // other (so that two stages cut it alike); -1: none.
  ShardLayout(const ParameterSet& parameters, int shards, int64_t bucket_elements, int alone = -1);

  bool operator==(const ShardLayout&) const = default;
  int shards() const { return shards_; }
  int64_t shard_elements() const { return flat_elements_ / shards_; }
  int buckets() const { return static_cast<int>(buckets_.size()); }
  // Ascending, covering the flat buffers.
  FlatRange bucket(int index) const { return buckets_[static_cast<size_t>(index)]; }
  int bucket_of_group(int group) const { return bucket_of_group_[static_cast<size_t>(group)]; }
  FlatRange piece(int bucket, int shard) const;
  // Where the pieces of this bucket begin in a shard's own buffers.
  int64_t place(int bucket) const { return this->bucket(bucket).begin / shards_; }
  // All of a shard but its piece of the bucket `left_out` (-1: none), neighbours joined: with one shard this is the
  // whole buffer in one.
  std::vector<FlatRange> pieces(int shard, int left_out = -1) const;

  // A part of a shard's own buffers.
  struct Segment {
    int shard;
    int64_t place;  // first element there
    FlatRange flat;
  };
  // Where the elements of `range` lie, in order.
  std::vector<Segment> segments(const FlatRange& range) const;

 private:
  int shards_;
  int64_t flat_elements_;
  std::vector<FlatRange> buckets_;
  std::vector<int> bucket_of_group_;
};

}  // namespace sb
