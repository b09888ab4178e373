#pragma once

#include <algorithm>
#include <cstdint>

namespace sb {

// One sequence cut into key blocks and query tiles, both counted from its start, and how many blocks each tile may
// have.
struct SequenceTiles {
  int64_t tokens = 0;
  int block = 128;
  int query_block = 16;
  int sink_blocks = 1;
  int local_blocks = 2;
  int64_t budget = 0;  // keys per query

  int64_t blocks() const { return (tokens + block - 1) / block; }
  int64_t tiles() const { return (tokens + query_block - 1) / query_block; }
  int64_t begin(int64_t tile) const { return tile * query_block; }
  int64_t end(int64_t tile) const { return std::min(tokens, (tile + 1) * query_block); }
  int rows(int64_t tile) const { return static_cast<int>(end(tile) - begin(tile)); }

  // Blocks that end before the tile: these compete. The tile's own blocks (one, or more when the tile is longer than a
  // block) follow them and are always selected.
  int64_t competing(int64_t tile) const { return begin(tile) / block; }
  int64_t visible(int64_t tile) const { return (end(tile) - 1) / block + 1; }

  bool forced(int64_t tile, int64_t j) const { return j < sink_blocks || j >= competing(tile) - local_blocks; }
  // Forced blocks among the competing ones.
  int64_t forced_competing(int64_t tile) const {
    return std::min<int64_t>(competing(tile), sink_blocks + local_blocks);
  }

  // Blocks this tile may list, its own included. Budgets that are no multiple of the block are met on average over the
  // tiles. Never fewer than sinks + local + 2, so that a token always has something to select.
  int64_t quota(int64_t tile) const {
    const int64_t share = (tile + 1) * budget / block - tile * budget / block;
    return std::max<int64_t>(share, sink_blocks + local_blocks + 2);
  }
  // Selections beyond the forced blocks, and whether there are more candidates than that.
  int64_t free_quota(int64_t tile) const {
    return std::max<int64_t>(0, quota(tile) - forced_competing(tile) - (visible(tile) - competing(tile)));
  }
  int64_t candidates(int64_t tile) const { return competing(tile) - forced_competing(tile); }
  // Blocks that are listed whatever is selected: the forced ones and the tile's own.
  int64_t given(int64_t tile) const { return forced_competing(tile) + visible(tile) - competing(tile); }
  // Blocks beyond those that the budget asks for.
  int64_t wanted(int64_t tile) const { return std::min(free_quota(tile), candidates(tile)); }

  // Whether the budget covers everything anyhow.
  bool everything_fits() const { return budget >= tokens; }
};

}  // namespace sb
