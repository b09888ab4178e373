#include <deque>

#include "core/errors.h"
#include "data/synthetic/synthetic_tasks.h"

namespace sb {

int64_t chunk_recall_token(int64_t i, int64_t length, int64_t chunk) {
  const int64_t half = length / 2, next = i + 1;
  if (next < half || next >= length) return 0;
  const int64_t token = (next - half) % chunk + 1;
  return token == 1 ? 0 : token;
}

namespace synthetic {
namespace {

// Where chunks may come from, when nothing within `distance` tokens may help: before the reach of the window, and not
// from what the chunks still inside the window repeat. The draw is by rejection.
class SourcePlaces {
 public:
  SourcePlaces(int64_t half, int64_t chunk, int64_t distance) : half_(half), chunk_(chunk), distance_(distance) {}

  int64_t draw(int64_t target, Random& random) {
    const int64_t last = distance_ > 0 ? std::min(half_ - chunk_, target - distance_ - chunk_) : half_ - chunk_;
    while (!recent_.empty() && recent_.front().target + chunk_ + distance_ < target) recent_.pop_front();
    int64_t source = 0;
    do {
      source = static_cast<int64_t>(random.below(static_cast<uint64_t>(last + 1)));
    } while (overlaps(source));
    if (distance_ > 0) recent_.push_back({target, source});
    return source;
  }

 private:
  struct Used {
    int64_t target, source;
  };
  bool overlaps(int64_t source) const {
    for (const Used& used : recent_)
      if (source < used.source + chunk_ && used.source < source + chunk_) return true;
    return false;
  }

  int64_t half_, chunk_, distance_;
  std::deque<Used> recent_;
};

}  // namespace

int64_t resolved_min_distance(const SyntheticOptions& options, int64_t length) {
  if (options.min_distance >= 0) return options.min_distance;
  if (options.task == SyntheticTask::chunk_recall || options.task == SyntheticTask::copy) return 0;
  return std::min<int64_t>(512, length / 4);
}

void check_recall(const SyntheticOptions& options, int64_t length) {
  const std::string_view name = synthetic_task_name(options.task);
  SB_USER_CHECK(options.vocab_size >= 2, "{}: vocab_size must be at least 2, got {}", name, options.vocab_size);
  if (options.task == SyntheticTask::copy) {
    SB_USER_CHECK(length >= 4, "copy: a sequence needs at least 4 tokens, got length {}", length);
    SB_USER_CHECK(options.min_distance <= length / 2,
                  "copy: repeats after half the length ({}), so min_distance cannot be {}", length / 2,
                  options.min_distance);
    return;
  }
  SB_USER_CHECK(options.chunk >= 2, "chunk_recall: chunk must be at least 2, got {}", options.chunk);
  SB_USER_CHECK(length >= 2 * options.chunk, "chunk_recall: length {} is too short for chunks of {}; use {} or more",
                length, options.chunk, 2 * options.chunk);
  // At most (distance / chunk + 2) chunks are inside a window and each forbids 2 chunk - 1 places: leave half free.
  const int64_t distance = resolved_min_distance(options, length);
  if (distance > 0) {
    const int64_t needed = 2 * (distance + 2 * options.chunk + 2 * (distance + 2 * options.chunk) * 2);
    SB_USER_CHECK(length >= needed, "chunk_recall: min_distance {} needs a length of {} or more, got {}", distance,
                  needed, length);
  }
}

int64_t count_recall_targets(const SyntheticOptions& options, int64_t length) {
  if (options.task == SyntheticTask::copy) return length - (length + 1) / 2 - 1;
  const int64_t second = length - length / 2, rest = second % options.chunk;
  return second / options.chunk * (options.chunk - 1) + (rest > 0 ? rest - 1 : 0);
}

Draft make_recall(const SyntheticOptions& options, int64_t length, Random& random) {
  const auto vocab = static_cast<uint64_t>(options.vocab_size);
  Draft draft;
  draft.tokens.reserve(static_cast<size_t>(length));
  draft.answer.reserve(static_cast<size_t>(length));
  if (options.task == SyntheticTask::copy) {
    const int64_t half = (length + 1) / 2;
    for (int64_t i = 0; i < half; ++i) draft.add(static_cast<int64_t>(random.below(vocab)));
    for (int64_t i = 0; half + i < length; ++i) draft.add(draft.tokens[static_cast<size_t>(i)], i > 0);
    return draft;
  }
  const int64_t half = length / 2;
  for (int64_t i = 0; i < half; ++i) draft.add(static_cast<int64_t>(random.below(vocab)));
  SourcePlaces places(half, options.chunk, resolved_min_distance(options, length));
  for (int64_t target = half; target < length; target += options.chunk) {
    const int64_t source = places.draw(target, random);
    for (int64_t j = 0; j < options.chunk && target + j < length; ++j)
      draft.add(draft.tokens[static_cast<size_t>(source + j)], j > 0);
  }
  return draft;
}

}  // namespace synthetic
}  // namespace sb
