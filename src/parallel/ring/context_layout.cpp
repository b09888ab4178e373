#include "parallel/ring/context_layout.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/errors.h"

namespace sb {

int context_owner(ContextPlacement placement, int ranks, int64_t blocks, int64_t block) {
  switch (placement) {
    case ContextPlacement::zigzag: {
      const int64_t runs = 2 * int64_t{ranks};
      // Few blocks: one a run, so that they do not all fall into the early runs of rank 0.
      const int64_t run = blocks >= runs ? block * runs / blocks : block;
      return static_cast<int>(run < ranks ? run : runs - 1 - run);
    }
    case ContextPlacement::striped:
      return static_cast<int>(block % ranks);
    case ContextPlacement::shifted:
      return static_cast<int>((block + block / ranks) % ranks);
    case ContextPlacement::triangular: {
      const int64_t turn = block / ranks;
      return static_cast<int>((block + turn * (turn + 1) / 2) % ranks);
    }
  }
  throw InternalError("no placement {}", static_cast<int>(placement));
}

ContextLayout::ContextLayout(ContextPlacement placement, int ranks, int block, std::span<const int32_t> cu_seqlens)
    : ranks_(ranks), block_(block), cu_seqlens_(cu_seqlens.begin(), cu_seqlens.end()) {
  SB_CHECK(ranks > 0 && block > 0, "{} ranks, blocks of {}", ranks, block);
  SB_CHECK(!cu_seqlens.empty() && cu_seqlens[0] == 0 && std::is_sorted(cu_seqlens.begin(), cu_seqlens.end()),
           "cu_seqlens must begin with 0 and not fall");
  first_block_.push_back(0);
  struct Load {
    int64_t tokens = 0, pairs = 0;
  };
  std::vector<Load> load(ranks), part(ranks);
  for (int s = 0; s < sequences(); ++s) {
    const int64_t count = (length(s) + block - 1) / block;
    first_block_.push_back(first_block_.back() + count);
    std::fill(part.begin(), part.end(), Load{});
    for (int64_t b = 0; b < count; ++b) {
      Load& target = part[context_owner(placement, ranks, count, b)];
      target.tokens += block_length(s, b);
      target.pairs += block_length(s, b) * (b * block + (block_length(s, b) + 1) / 2);
    }
    // Of the squares of the sums only have · more depends on the turn. (The largest sum would not do: it is often the
    // same whatever the turn.)
    int offset = 0;
    std::pair<int64_t, double> best;
    for (int turn = 0; turn < ranks; ++turn) {
      std::pair<int64_t, double> product{0, 0};
      for (int r = 0; r < ranks; ++r) {
        const Load &have = load[(r + turn) % ranks], &more = part[r];
        product.first += have.tokens * more.tokens;
        product.second += static_cast<double>(have.pairs) * static_cast<double>(more.pairs);
      }
      if (turn == 0 || product < best) {
        best = product;
        offset = turn;
      }
    }
    for (int r = 0; r < ranks; ++r) {
      load[(r + offset) % ranks].tokens += part[r].tokens;
      load[(r + offset) % ranks].pairs += part[r].pairs;
    }
    for (int64_t b = 0; b < count; ++b) owner_.push_back((context_owner(placement, ranks, count, b) + offset) % ranks);
  }
  place_.resize(owner_.size());
  held_begin_.push_back(0);
  for (int r = 0; r < ranks; ++r)
    for (int s = 0; s < sequences(); ++s) {
      for (int64_t b = 0; b < blocks(s); ++b)
        if (owner(s, b) == r) {
          place_[first_block_[s] + b] = static_cast<int32_t>(static_cast<int64_t>(held_.size()) - held_begin_.back());
          held_.push_back(static_cast<int32_t>(b));
        }
      held_begin_.push_back(static_cast<int64_t>(held_.size()));
    }
}

// Of every sequence what the ranks have differs by at most a block; with zigzag, whose runs are rounded twice, by two.
// Deviations from the share then have squares that sum to at most ranks · block². Over all turns have · more is, for
// deviations, zero on average and so at best not above: the squares of the sums grow by no more than that a sequence,
// and the largest of `ranks` deviations that sum to zero is at most √((ranks - 1) / ranks) of their length.
int64_t ContextLayout::most_tokens(int ranks, int block, int64_t tokens, int64_t sequences) {
  if (ranks == 1) return tokens;
  const double together = std::sqrt(static_cast<double>(sequences) * (ranks - 1)) / 2;
  const int64_t excess = 2 * block * std::min(sequences, static_cast<int64_t>(std::ceil(together)));
  return std::min(tokens, tokens / ranks + 1 + excess);
}

int64_t ContextLayout::most_sequence_tokens(int ranks, int block, int64_t tokens) {
  const int64_t turn = int64_t{ranks} * block;
  return std::min(tokens, (tokens + turn - 1) / turn * block);
}

std::span<const int32_t> ContextLayout::held(int rank, int sequence) const {
  const int64_t slot = int64_t{rank} * sequences() + sequence;
  return std::span(held_).subspan(held_begin_[slot], held_begin_[slot + 1] - held_begin_[slot]);
}

std::span<const int32_t> ContextLayout::held_from(int rank, int sequence, int64_t first) const {
  const std::span<const int32_t> all = held(rank, sequence);
  return all.subspan(static_cast<size_t>(std::ranges::lower_bound(all, first / block_) - all.begin()));
}

std::vector<int32_t> ContextLayout::local_cu_seqlens(int rank) const {
  std::vector<int32_t> lengths = {0};
  for (int s = 0; s < sequences(); ++s) {
    int64_t tokens = 0;
    for (const int32_t b : held(rank, s)) tokens += block_length(s, b);
    lengths.push_back(lengths.back() + static_cast<int32_t>(tokens));
  }
  return lengths;
}

std::vector<int32_t> ContextLayout::tokens(int rank) const {
  std::vector<int32_t> result;
  for (int s = 0; s < sequences(); ++s)
    for (const int32_t b : held(rank, s)) {
      const int32_t begin = cu_seqlens_[s] + b * block_;
      for (int64_t i = 0; i < block_length(s, b); ++i) result.push_back(begin + static_cast<int32_t>(i));
    }
  return result;
}

int64_t RingWork::total() const {
  return std::accumulate(ring.begin(), ring.end(), int64_t{0}) +
         std::accumulate(outside.begin(), outside.end(), int64_t{0});
}

double RingWork::worker_imbalance() const {
  if (total() == 0) return 1;
  int64_t most = 0;
  for (int w = 0; w < ranks; ++w) {
    int64_t sum = outside[w];
    for (int t = 0; t < ranks; ++t) sum += at(w, t);
    most = std::max(most, sum);
  }
  return static_cast<double>(most) * ranks / static_cast<double>(total());
}

double RingWork::step_imbalance() const {
  double sum = 0;
  for (int w = 0; w < ranks; ++w) {
    int64_t most = 0, all = 0;
    for (int t = 0; t < ranks; ++t) {
      most = std::max(most, at(w, t));
      all += at(w, t);
    }
    sum += all == 0 ? 1 : static_cast<double>(most) * ranks / static_cast<double>(all);
  }
  return sum / ranks;
}

double RingWork::lock_step_over_ideal() const {
  if (total() == 0) return 1;
  int64_t time = *std::max_element(outside.begin(), outside.end());
  for (int t = 0; t < ranks; ++t) {
    int64_t most = 0;
    for (int w = 0; w < ranks; ++w) most = std::max(most, at(w, t));
    time += most;
  }
  return static_cast<double>(time) * ranks / static_cast<double>(total());
}

namespace {

// Causal pairs of query tokens [begin, end) with keys [key, key + keys) of the same sequence.
int64_t causal_pairs(int64_t begin, int64_t end, int64_t key, int64_t keys) {
  const auto up_to = [](int64_t n) { return n > 0 ? n * (n + 1) / 2 : 0; };
  // Token t sees min(keys, t - key + 1) of them, if any.
  const auto prefix = [&](int64_t tokens) {  // of tokens before `tokens`
    const int64_t n = tokens - key;
    return up_to(std::min(n, keys)) + std::max<int64_t>(0, n - keys) * keys;
  };
  return begin < end ? prefix(end) - prefix(begin) : 0;
}

}  // namespace

RingWork count_ring_work(const ContextLayout& layout, const BlockIndex& index, int replicated_blocks,
                         int64_t first_query) {
  const int ranks = layout.ranks();
  RingWork work;
  work.ranks = ranks;
  work.ring.resize(int64_t{ranks} * ranks);
  work.outside.resize(ranks);
  SB_CHECK(static_cast<int>(index.sequences().size()) == layout.sequences(), "an index of other sequences");
  const int block = layout.block(), query_block = index.shape().query_block;
  for (int s = 0; s < layout.sequences(); ++s) {
    const BlockIndex::Sequence& sequence = index.sequences()[s];
    if (sequence.dense) {
      for (int64_t i = first_query / block; i < layout.blocks(s); ++i)
        for (int64_t j = 0; j <= i; ++j) {
          const int w = layout.owner(s, i), t = (w - layout.owner(s, j) + ranks) % ranks;
          work.ring[int64_t{w} * ranks + t] +=
              index.shape().list_heads *
              causal_pairs(i * block, i * block + layout.block_length(s, i), j * block, layout.block_length(s, j));
        }
      continue;
    }
    SB_CHECK(index.shape().block == block && block % query_block == 0, "blocks of {} and {} over tiles of {}",
             index.shape().block, block, query_block);
    for (int head = 0; head < index.shape().list_heads; ++head)
      for (int tile = static_cast<int>(first_query / query_block); tile < sequence.query_blocks; ++tile) {
        const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, tile));
        const int64_t begin = int64_t{tile} * query_block, end = begin + index.query_tokens(sequence, tile);
        const int w = layout.owner(s, begin / block);
        for (size_t n = 0; n < row.blocks.size(); ++n) {
          const int64_t j = row.blocks[n];
          const int64_t pairs =
              causal_pairs(std::min(end, begin + row.first[n]), end, j * block, layout.block_length(s, j));
          if (j < replicated_blocks)
            work.outside[w] += pairs;
          else
            work.ring[int64_t{w} * ranks + (w - layout.owner(s, j) + ranks) % ranks] += pairs;
        }
        for (const int32_t column : row.columns) work.outside[w] += causal_pairs(begin, end, column, 1);
      }
  }
  return work;
}

}  // namespace sb
