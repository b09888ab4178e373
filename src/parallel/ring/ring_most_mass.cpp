// `mass` with look-ahead where several ranks share the sequences: the best pairs of a whole sequence, of which every
// rank knows the masses of its own queries. The least mass that is selected is found by counting, digit by digit; ties
// go to the earlier query block, as on one rank.
#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/select/block_scores.h"
#include "parallel/ring/ring_selection.h"

namespace sb {
namespace {

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

// An integer that orders as the mass does; what is no number comes last.
uint32_t ordered(float mass) {
  if (std::isnan(mass)) return 0;
  const auto bits = std::bit_cast<uint32_t>(mass + 0.0f);  // of two zeros neither is larger
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// The masses of one list head: of every query block that this rank holds over the key blocks that compete.
struct HeadMasses {
  struct Tile {
    int64_t tile = 0, held = 0;  // held: number of its key block in the sequence
    std::vector<float> masses;
  };
  std::vector<Tile> tiles;

  // Calls body(tile, key block, ordered mass) for all that may be selected, in the order of the sequence.
  template <typename Body>
  void each(const SequenceTiles& of, const Body& body) const {
    for (const Tile& one : tiles)
      for (int64_t j = 0; j < std::ssize(one.masses); ++j)
        if (!of.forced(one.tile, j)) body(one, j, ordered(one.masses[j]));
  }
};

// The mass of the last pair that is selected when `wanted` are, and how many of those that have it are among them.
struct LastSelected {
  uint32_t mass = 0;
  int64_t with_it = 0, all_with_it = 0;
};

LastSelected find_last(Communicator& group, const SequenceTiles& tiles, const HeadMasses& own, int64_t wanted) {
  LastSelected last{0, wanted, 0};
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    std::vector<int64_t> counts(kDigits);
    own.each(tiles, [&](const HeadMasses::Tile&, int64_t, uint32_t mass) {
      if (shift + kDigitBits == 32 || mass >> (shift + kDigitBits) == last.mass >> (shift + kDigitBits))
        ++counts[mass >> shift & (kDigits - 1)];
    });
    group.all_reduce(std::span<int64_t>(counts));
    int digit = kDigits - 1;
    for (; last.with_it > counts[digit]; --digit) last.with_it -= counts[digit];
    last.mass |= static_cast<uint32_t>(digit) << shift;
    last.all_with_it = counts[digit];
  }
  return last;
}

}  // namespace

void RingSelection::select_most_mass_rows(const Exec& exec, Communicator& group, const SelectionRequest& request) {
  const SequenceTiles& tiles = request.tiles;
  const int64_t tiles_a_block = tiles.block / tiles.query_block;
  int64_t wanted = 0;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile)
    wanted += std::min(tiles.free_quota(tile), tiles.candidates(tile));
  for (int head = 0; head < request.shape.kv_heads; ++head) {
    HeadMasses own;
    for (const int32_t b : request.held_blocks)
      for (int64_t tile = b * tiles_a_block; tile < std::min((b + 1) * tiles_a_block, tiles.tiles()); ++tile)
        own.tiles.push_back({tile, b, {}});
    exec.pool->parallel_for(std::ssize(request.held_blocks), 1, [&](int64_t place, int64_t, int) {
      const int64_t first = request.held_blocks[place] * tiles_a_block,
                    last = std::min(first + tiles_a_block, tiles.tiles());
      const int64_t competing = tiles.competing(first);
      if (competing == 0) return;
      BlockScorer scorer(request.shape, BlockScoring(selector_.config()), request.q, request.statistics, tiles.blocks(),
                         (request.held_blocks[place] - place) * tiles.block, request.planes);
      const float* found = scorer.tile_masses(head, tiles, first, last, competing);
      for (int64_t tile = first; tile < last; ++tile)
        own.tiles[place * tiles_a_block + tile - first].masses.assign(found + (tile - first) * competing,
                                                                      found + (tile - first + 1) * competing);
    });

    std::vector<std::vector<IndexEntry>> rows(own.tiles.size());
    if (wanted > 0) {
      const LastSelected last = find_last(group, tiles, own, wanted);
      // Where some that have the last mass stay out: those of earlier blocks of the sequence, on any rank, come first.
      std::vector<int64_t> before(last.with_it < last.all_with_it ? tiles.blocks() + 1 : 0);
      if (!before.empty()) {
        own.each(tiles, [&](const HeadMasses::Tile& tile, int64_t, uint32_t mass) {
          if (mass == last.mass) ++before[tile.held + 1];
        });
        group.all_reduce(std::span<int64_t>(before));
        for (size_t b = 1; b < before.size(); ++b) before[b] += before[b - 1];
      }
      own.each(tiles, [&](const HeadMasses::Tile& tile, int64_t j, uint32_t mass) {
        if (mass < last.mass || (mass == last.mass && !before.empty() && before[tile.held]++ >= last.with_it)) return;
        rows[&tile - own.tiles.data()].push_back({static_cast<uint16_t>(j), 0});
      });
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      for (int64_t j = 0; j < tiles.visible(own.tiles[i].tile); ++j)
        if (tiles.forced(own.tiles[i].tile, j)) rows[i].push_back({static_cast<uint16_t>(j), 0});
      std::sort(rows[i].begin(), rows[i].end(),
                [](const IndexEntry& a, const IndexEntry& b) { return a.block < b.block; });
      builder_.set_row(0, BlockIndex::row_id(request.place, head, static_cast<int>(own.tiles[i].tile)), rows[i]);
    }
  }
}

int64_t RingSelection::select_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const {
  const SelectionConfig& config = selector_.config();
  if (config.pattern != SelectionPattern::mass || config.order != SelectionOrder::lookahead) return 0;
  // Masses of all query blocks of one head, over half of the key blocks.
  const int64_t tiles = max_tokens / config.query_block + 1, blocks = max_tokens * ranks / config.block + 1;
  return tiles * (blocks / 2 + 1) * static_cast<int64_t>(sizeof(float)) +
         tiles * static_cast<int64_t>(sizeof(std::vector<float>) + sizeof(std::vector<IndexEntry>));
}

}  // namespace sb
