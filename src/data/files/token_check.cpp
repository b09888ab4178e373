#include "data/files/token_check.h"

#include <algorithm>
#include <mutex>

#include "core/errors.h"
#include "core/thread_pool.h"
#include "data/files/label_mask.h"

namespace sb {
namespace {

// Tokens read at once, and of one piece of a spot check: long enough that a disk is not kept busy with seeking.
constexpr int64_t kPiece = 65536;
// Documents a thread takes at once.
constexpr int64_t kGrain = 16;

int64_t id_limit(int64_t vocab_size) {
  return vocab_size > 0 ? vocab_size : int64_t{INT32_MAX} + 1;
}

// Both ends in one pass that the compiler can vectorize.
std::pair<int32_t, int32_t> range_of(std::span<const int32_t> tokens) {
  int32_t smallest = INT32_MAX, largest = INT32_MIN;
  for (const int32_t token : tokens) {
    smallest = std::min(smallest, token);
    largest = std::max(largest, token);
  }
  return {smallest, largest};
}

bool all_inside(std::span<const int32_t> tokens, int64_t limit) {
  const auto [smallest, largest] = range_of(tokens);
  return tokens.empty() || (smallest >= 0 && largest < limit);
}

void check_document(const TokenFile& file, int64_t document, int64_t limit, std::vector<int32_t>& buffer,
                    TokenCheck& found) {
  const int64_t length = file.length(document);
  const int64_t outside_before = found.outside_tokens;
  for (int64_t begin = 0; begin < length; begin += kPiece) {
    buffer.resize(static_cast<size_t>(std::min(kPiece, length - begin)));
    file.read(document, begin, std::ssize(buffer), buffer.data());
    const auto [smallest, largest] = range_of(buffer);
    found.smallest = std::min(found.smallest, smallest);
    found.largest = std::max(found.largest, largest);
    if (smallest >= 0 && largest < limit) continue;
    for (int64_t i = 0; i < std::ssize(buffer); ++i) {
      const int32_t id = buffer[static_cast<size_t>(i)];
      if (id >= 0 && id < limit) continue;
      if (!found.outside) found.outside = {document, begin + i, id};
      ++found.outside_tokens;
    }
  }
  ++found.documents;
  found.tokens += length;
  found.short_documents += length < 2;
  found.outside_documents += found.outside_tokens > outside_before;
  if (const LabelMask* mask = file.mask(); mask && length > 0) {
    const int64_t targets = mask->count(document, 1, length);
    found.targets += targets;
    if (targets != mask->valid_targets(document)) {
      if (!found.wrong_mask) found.wrong_mask = document;
      ++found.wrong_masks;
    }
  } else {
    found.targets += std::max<int64_t>(length - 1, 0);
  }
}

void merge(TokenCheck& into, const TokenCheck& part) {
  into.documents += part.documents;
  into.tokens += part.tokens;
  into.targets += part.targets;
  into.short_documents += part.short_documents;
  into.smallest = std::min(into.smallest, part.smallest);
  into.largest = std::max(into.largest, part.largest);
  into.outside_tokens += part.outside_tokens;
  into.outside_documents += part.outside_documents;
  into.wrong_masks += part.wrong_masks;
  if (part.outside && (!into.outside || part.outside->document < into.outside->document)) into.outside = part.outside;
  if (part.wrong_mask && (!into.wrong_mask || *part.wrong_mask < *into.wrong_mask)) into.wrong_mask = part.wrong_mask;
}

}  // namespace

void check_token_ids(const TokenFile& file, int64_t document, int64_t begin, std::span<const int32_t> tokens,
                     int64_t vocab_size) {
  const int64_t limit = id_limit(vocab_size);
  if (all_inside(tokens, limit)) return;
  const auto bad = std::find_if(tokens.begin(), tokens.end(), [&](int32_t id) { return id < 0 || id >= limit; });
  throw UserError(
      "{0}: token {1} of document {2} is {3}, outside the vocabulary of {4}; was the file made with another tokenizer? "
      "`sparsebalance data check --vocab-size {4} {0}` counts all such tokens",
      file.name(), begin + (bad - tokens.begin()), document, *bad, limit);
}

int64_t spot_check_ids(const std::vector<const TokenFile*>& files, int64_t vocab_size, int64_t most_tokens) {
  int64_t total = 0;
  for (const TokenFile* file : files) total += file->total_tokens();
  const int64_t pieces = std::max<int64_t>(1, most_tokens / kPiece);
  const int64_t distance = total <= most_tokens ? 0 : total / pieces;
  int64_t passed = 0, next = 0, left = 0, looked_at = 0;
  std::vector<int32_t> buffer;
  for (const TokenFile* file : files)
    for (int64_t document = 0; document < file->documents(); ++document) {
      const int64_t length = file->length(document);
      for (int64_t begin = 0; begin < length;) {
        if (left == 0 && next > passed) {
          const int64_t skipped = std::min(next - passed, length - begin);
          passed += skipped;
          begin += skipped;
          continue;
        }
        if (left == 0) {
          left = kPiece;
          next += distance;
        }
        buffer.resize(static_cast<size_t>(std::min(left, length - begin)));
        file->read(document, begin, std::ssize(buffer), buffer.data());
        check_token_ids(*file, document, begin, buffer, vocab_size);
        passed += std::ssize(buffer);
        begin += std::ssize(buffer);
        left -= std::ssize(buffer);
        looked_at += std::ssize(buffer);
      }
    }
  return looked_at;
}

TokenCheck check_token_file(const TokenFile& file, int64_t vocab_size, ThreadPool& threads,
                            const std::function<void(int64_t tokens)>& progress) {
  const int64_t limit = id_limit(vocab_size);
  TokenCheck found;
  std::mutex mutex;
  threads.parallel_for(file.documents(), kGrain, [&](int64_t begin, int64_t end, int) {
    TokenCheck part;
    std::vector<int32_t> buffer;
    for (int64_t document = begin; document < end; ++document) check_document(file, document, limit, buffer, part);
    const std::lock_guard lock(mutex);
    merge(found, part);
    if (progress) progress(found.tokens);
  });
  return found;
}

}  // namespace sb
