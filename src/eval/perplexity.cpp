#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "core/labels.h"

namespace sb {

double PositionLosses::Bucket::perplexity() const {
  return tokens == 0 ? 0.0 : std::exp(loss / static_cast<double>(tokens));
}

void PositionLosses::add(std::span<const float> token_loss, std::span<const int32_t> labels) {
  SB_CHECK(token_loss.size() == labels.size(), "{} losses, {} labels", token_loss.size(), labels.size());
  size_t bucket = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    while (bucket >= buckets_.size() || static_cast<int64_t>(i) >= buckets_[bucket].end) {
      if (bucket < buckets_.size()) {
        ++bucket;
        continue;
      }
      const int64_t begin = buckets_.empty() ? 0 : buckets_.back().end;
      buckets_.push_back({begin, begin == 0 ? first_bucket_ : 2 * begin, 0, 0});
    }
    if (labels[i] == kIgnoredLabel) continue;
    ++buckets_[bucket].tokens;
    buckets_[bucket].loss += token_loss[i];
  }
}

PositionLosses::Bucket PositionLosses::total() const {
  Bucket sum;
  for (const Bucket& bucket : buckets_) {
    sum.end = std::max(sum.end, bucket.end);
    sum.tokens += bucket.tokens;
    sum.loss += bucket.loss;
  }
  return sum;
}

}  // namespace sb
