#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sb {

// Loss by position in the sequence, in buckets that double: 0–1023, 1024–2047, 2048–4095, …
class PositionLosses {
 public:
  explicit PositionLosses(int64_t first_bucket = 1024) : first_bucket_(first_bucket) {}

  // token_loss[i] belongs to position i and counts where labels[i] is not kIgnoredLabel.
  void add(std::span<const float> token_loss, std::span<const int32_t> labels);

  struct Bucket {
    int64_t begin = 0, end = 0;  // positions
    int64_t tokens = 0;
    double loss = 0;  // sum
    double perplexity() const;
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  Bucket total() const;

 private:
  int64_t first_bucket_;
  std::vector<Bucket> buckets_;
};

}  // namespace sb
