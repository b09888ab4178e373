#include "data/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace sb {
namespace {

// Up to this many symbols, scanning for the best pair again and again beats a heap.
constexpr size_t kShortWord = 64;
constexpr int32_t kNoMerge = INT32_MAX;

uint64_t mix(uint64_t value) {
  value *= 0x9E3779B97F4A7C15u;
  return value ^ value >> 32;
}

uint64_t pack(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

void BpeModel::reserve(size_t tokens, size_t merges) {
  tokens_.reserve(tokens);
  grow(std::bit_ceil(2 * merges + 16));
}

void BpeModel::grow(size_t slots) {
  std::vector<Merge> old(slots);
  old.swap(merges_);
  for (const Merge& merge : old) {
    if (merge.pair == UINT64_MAX) continue;
    size_t slot = mix(merge.pair) & (slots - 1);
    while (merges_[slot].pair != UINT64_MAX) slot = (slot + 1) & (slots - 1);
    merges_[slot] = merge;
  }
}

void BpeModel::add_token(std::string bytes, int32_t id) {
  if (bytes.size() == 1) byte_tokens_[static_cast<unsigned char>(bytes[0])] = id;
  tokens_.emplace(std::move(bytes), id);
}

void BpeModel::add_merge(int32_t left, int32_t right, int32_t merged) {
  if (2 * (merge_count_ + 1) > merges_.size()) grow(std::max<size_t>(16, 2 * merges_.size()));
  const uint64_t pair = pack(left, right);
  size_t slot = mix(pair) & (merges_.size() - 1);
  while (merges_[slot].pair != UINT64_MAX && merges_[slot].pair != pair) slot = (slot + 1) & (merges_.size() - 1);
  if (merges_[slot].pair != pair) ++merge_count_;
  merges_[slot] = {pair, next_rank_++, merged};
}

const BpeModel::Merge* BpeModel::find_merge(int32_t left, int32_t right) const {
  if (merges_.empty()) return nullptr;
  const uint64_t pair = pack(left, right);
  size_t slot = mix(pair) & (merges_.size() - 1);
  while (merges_[slot].pair != UINT64_MAX) {
    if (merges_[slot].pair == pair) return &merges_[slot];
    slot = (slot + 1) & (merges_.size() - 1);
  }
  return nullptr;
}

int32_t BpeModel::find(std::string_view bytes) const {
  const auto found = tokens_.find(bytes);
  return found == tokens_.end() ? kNone : found->second;
}

int64_t BpeModel::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    const int32_t whole = find(word);
    if (whole != kNone) {
      ids.push_back(whole);
      return -1;
    }
  }
  scratch.ids.clear();
  for (size_t i = 0; i < word.size(); ++i) {
    int32_t id = byte_tokens_[static_cast<unsigned char>(word[i])];
    if (id == kNone) id = unknown_;
    if (id == kNone) return static_cast<int64_t>(i);
    scratch.ids.push_back(id);
  }
  if (scratch.ids.size() <= kShortWord)
    merge_short(scratch);
  else
    merge_long(scratch);
  ids.insert(ids.end(), scratch.ids.begin(), scratch.ids.end());
  return -1;
}

void BpeModel::merge_short(Scratch& scratch) const {
  std::vector<int32_t>& ids = scratch.ids;
  if (ids.size() < 2) return;
  // ranks[i], merged[i]: of the pair (i, i + 1).
  scratch.ranks.resize(ids.size() - 1);
  scratch.merged.resize(ids.size() - 1);
  const auto look_up = [&](size_t i) {
    const Merge* merge = find_merge(ids[i], ids[i + 1]);
    scratch.ranks[i] = merge ? merge->rank : kNoMerge;
    scratch.merged[i] = merge ? merge->merged : kNone;
  };
  for (size_t i = 0; i + 1 < ids.size(); ++i) look_up(i);
  while (ids.size() > 1) {
    const auto best = std::min_element(scratch.ranks.begin(), scratch.ranks.end());
    if (*best == kNoMerge) return;
    const auto at = static_cast<size_t>(best - scratch.ranks.begin());
    ids[at] = scratch.merged[at];
    ids.erase(ids.begin() + static_cast<int64_t>(at) + 1);
    scratch.ranks.erase(best);
    scratch.merged.erase(scratch.merged.begin() + static_cast<int64_t>(at));
    if (at > 0) look_up(at - 1);
    if (at + 1 < ids.size()) look_up(at);
  }
}

// The same result for words of any size in n log n: a heap of candidate merges over a linked list of symbols. A
// candidate is stale when its symbols have changed since.
void BpeModel::merge_long(Scratch& scratch) const {
  std::vector<Symbol>& symbols = scratch.symbols;
  std::vector<Candidate>& heap = scratch.heap;
  const auto count = static_cast<int32_t>(scratch.ids.size());
  symbols.clear();
  heap.clear();
  for (int32_t i = 0; i < count; ++i)
    symbols.push_back({scratch.ids[static_cast<size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1});
  const auto consider = [&](int32_t at) {
    const Symbol& left = symbols[static_cast<size_t>(at)];
    if (left.next < 0) return;
    const Symbol& right = symbols[static_cast<size_t>(left.next)];
    if (const Merge* merge = find_merge(left.id, right.id))
      heap.push_back({merge->rank, at, left.id, right.id, merge->merged});
  };
  for (int32_t i = 0; i + 1 < count; ++i) consider(i);
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate best = heap.back();
    heap.pop_back();
    Symbol& left = symbols[static_cast<size_t>(best.at)];
    if (left.id != best.left || left.next < 0) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    if (right.id != best.right) continue;
    left.id = best.merged;
    right.id = kNone;
    left.next = right.next;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.at;
    for (int32_t at : {left.previous, best.at}) {
      if (at < 0) continue;
      const size_t before = heap.size();
      consider(at);
      if (heap.size() > before) std::push_heap(heap.begin(), heap.end());
    }
  }
  scratch.ids.clear();
  for (int32_t at = 0; at >= 0; at = symbols[static_cast<size_t>(at)].next)
    scratch.ids.push_back(symbols[static_cast<size_t>(at)].id);
}

namespace {
constexpr size_t kCacheSlots = size_t{1} << 16;
}

WordCache::WordCache() : entries_(kCacheSlots) {}

uint64_t WordCache::hash(std::string_view word) {
  uint64_t state = word.size() * 0xA0761D6478BD642Fu;
  size_t i = 0;
  for (; i + 8 <= word.size(); i += 8) {
    uint64_t part = 0;
    std::memcpy(&part, word.data() + i, 8);
    state = mix(state ^ part);
  }
  uint64_t rest = 0;
  if (i < word.size()) std::memcpy(&rest, word.data() + i, word.size() - i);
  return mix(mix(state ^ rest));
}

bool WordCache::find(std::string_view word, uint64_t hash, std::vector<int32_t>& ids) const {
  for (size_t slot = hash & (kCacheSlots - 1); entries_[slot].bytes != 0; slot = (slot + 1) & (kCacheSlots - 1)) {
    const Entry& entry = entries_[slot];
    if (entry.hash == hash && entry.bytes == word.size() &&
        std::memcmp(bytes_.data() + entry.bytes_at, word.data(), word.size()) == 0) {
      ids.insert(ids.end(), ids_.begin() + entry.ids_at, ids_.begin() + entry.ids_at + entry.ids);
      return true;
    }
  }
  return false;
}

void WordCache::insert(std::string_view word, uint64_t hash, const int32_t* ids, size_t count) {
  if (2 * (used_ + 1) > kCacheSlots) {
    std::fill(entries_.begin(), entries_.end(), Entry{});
    bytes_.clear();
    ids_.clear();
    used_ = 0;
  }
  size_t slot = hash & (kCacheSlots - 1);
  while (entries_[slot].bytes != 0) slot = (slot + 1) & (kCacheSlots - 1);
  entries_[slot] = {hash, static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(ids_.size()),
                    static_cast<uint16_t>(word.size()), static_cast<uint16_t>(count)};
  bytes_.insert(bytes_.end(), word.begin(), word.end());
  ids_.insert(ids_.end(), ids, ids + count);
  ++used_;
}

}  // namespace sb
