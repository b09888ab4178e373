#pragma once

// The loading warp of the kernels that walk row lists: takes tiles from the queue, reads their lists, and feeds Q (and
// dO), K and V to the computing warpgroups through rings of barriers. CUDA files only.

#include "attention/gpu/hopper/gathered.cuh"
#include "attention/gpu/hopper/tile.cuh"

namespace sb::gpu {

// What the loader tells the others about a tile: the item, and whether there is any key block to see.
struct TileMessage {
  ForwardItem item;
  int32_t state;  // 0: blocks follow, 1: nothing to see, 2: no more tiles
  int32_t unused[3];
};
// About one step: where the key block starts, relative to the first token of the tile, and the first token of the tile
// that sees it. Of gathered columns: what `offset` says in gathered.cuh, the place of the first among all columns, and
// in `seen` for the lanes l, l + 4, … bit 8 · (j % 4) + 2 · (j / 4) + e for column 8 · j + 2 · l + e. With key blocks
// of 64 a step takes two, which need not be neighbours; a missing second one lies after everything.
constexpr int32_t kNoHalf = 1 << 28;
struct StepMessage {
  int32_t offset;
  int32_t first;
  uint32_t last;
  int32_t column;
  uint32_t seen[4];
  int32_t second_offset, second_first;
};

struct RowArguments {
  int32_t heads_per_kv;  // list heads of a key/value head
  RowMap rows;
  const ForwardItem* items;
  int32_t item_count;
  const uint32_t* entries;
  int32_t* counter;
  GatheredColumns gathered;
  int32_t query_block;
  int32_t first_query;  // as in Shape
};

// Whether `seen` of a step has column 8 · j + 2 · (lane % 4) + e.
__device__ __forceinline__ bool seen_column(uint32_t seen, int j, int e) {
  return (seen >> (8 * (j % 4) + 2 * (j / 4) + e) & 1) != 0;
}

template <typename Smem>
struct RowLoader {
  static constexpr int D = Smem::kDim;
  static constexpr int kStages = Smem::kStages;
  static constexpr int kNone = INT32_MIN;
  static constexpr int kKeys = Smem::kHalves ? kBlock / 2 : kBlock;  // of a block
  // Of a step: `token` and what the message says.
  struct Keys {
    int token = kNone, offset = 0, first = 0;
  };
  Smem& smem;
  const CUtensorMap *q_map, *do_map, *k_map, *v_map;
  const CUtensorMap *gathered_k_map, *gathered_v_map;
  const RowArguments& args;
  int lane;
  Cursor tile, k, v;
  uint32_t gradient_phase = 0;

  // Places of gathered columns come as ~place.
  __device__ void load_block(__nv_bfloat16* destination, const CUtensorMap* map, const CUtensorMap* gathered_map,
                             int head, int token, int second, uint64_t& full) {
    const uint32_t barrier = shared_address(&full);
    if (lane == 0) barrier_expect(barrier, kBlock * D * 2);
    __syncwarp();
    if (Smem::kGathered && token < 0) {
      map = gathered_map;
      head = 0;
      token = ~token;
    } else if (Smem::kHalves) {
      const int half = lane / (D / 64), c = lane % (D / 64);
      if (half < 2)
        tensor_load(shared_address(destination) + c * kBlock * 128 + half * kKeys * 128, map, c * 64, head,
                    half == 0 ? token : second, barrier);
      return;
    }
    if (lane < D / 64)
      tensor_load(shared_address(destination) + lane * kBlock * 128, map, lane * 64, head, token, barrier);
  }

  __device__ void load_k(int head, const Keys& keys, const Keys& second, uint32_t last, const uint4& seen) {
    barrier_wait(shared_address(&smem.k_empty[k.stage]), k.phase ^ 1);
    StepMessage& message = smem.step[k.stage];
    if (lane == 0) {
      message.offset = keys.offset;
      message.first = keys.first;
      message.last = last;
      if constexpr (Smem::kHalves) {
        message.second_offset = second.offset;
        message.second_first = second.first;
      }
    }
    if (Smem::kGathered && keys.token < 0) {
      if (lane == 0) message.column = ~keys.token;
      const auto own = [&](uint32_t word) { return word >> 2 * lane & 0x03030303u; };
      if (lane < 4) message.seen[lane] = own(seen.x) | own(seen.y) << 2 | own(seen.z) << 4 | own(seen.w) << 6;
      __syncwarp();
    }
    load_block(smem.k[k.stage], k_map, gathered_k_map, head, keys.token, second.token, smem.k_full[k.stage]);
    k.advance(kStages);
  }

  __device__ void load_v(int head, int token, int second) {
    barrier_wait(shared_address(&smem.v_empty[v.stage]), v.phase ^ 1);
    load_block(smem.v[v.stage], v_map, gathered_v_map, head, token, second, smem.v_full[v.stage]);
    v.advance(kStages);
  }

  __device__ uint32_t row_bytes() const { return 2 * args.rows.heads * args.rows.tokens * D * 2; }
  __device__ void load_rows(__nv_bfloat16* destination, const CUtensorMap* map, const ForwardItem& item,
                            uint32_t barrier) {
    constexpr int kBoxes = D / 64;
    if (lane < 2 * kBoxes)
      tensor_load(shared_address(destination) + lane * kSubtileRows * 128, map, (lane % kBoxes) * 64,
                  item.head * args.rows.heads, item.token + lane / kBoxes * args.rows.tokens, barrier);
  }

  __device__ void announce(const ForwardItem& item, int state) {
    barrier_wait(shared_address(&smem.q_empty[tile.stage]), tile.phase ^ 1);
    __syncwarp();  // or a lane that lags finds the phase after this one
    const uint32_t barrier = shared_address(&smem.q_full[tile.stage]);
    if (lane == 0) {
      smem.tile[tile.stage].item = item;
      smem.tile[tile.stage].state = state;
      if (state != 0)
        barrier_arrive(barrier);
      else
        barrier_expect(barrier, row_bytes());
    }
    __syncwarp();
    if (state == 0) load_rows(smem.q[tile.stage], q_map, item, barrier);
    tile.advance(Smem::kSlots);
  }

  // dO has a single buffer, which is free before the tile's end.
  __device__ void load_gradient(const ForwardItem& item) {
    const uint32_t barrier = shared_address(&smem.do_full);
    barrier_wait(shared_address(&smem.do_empty), gradient_phase ^ 1);
    if (lane == 0) barrier_expect(barrier, row_bytes());
    __syncwarp();
    load_rows(smem.d_o, do_map, item, barrier);
    gradient_phase ^= 1;
  }

  __device__ uint32_t read_entry(const ForwardItem& item, int i) const {
    return i < item.list_count ? args.entries[item.list_begin + i] : 0;
  }

  // Of up to 32 times 128 gathered columns, a lane each: which the tile's query block sees, and whether some are after
  // the tile's first token.
  struct Pieces {
    uint4 seen{0, 0, 0, 0};
    bool late = false;
  };
  __device__ Pieces read_pieces(const ForwardItem& item, int base) const {
    Pieces own;
    const GatheredList& list = args.gathered.lists[item.gathered];
    if (base + lane < list.pieces / 2) {
      const int64_t row = list.bits + static_cast<int64_t>(item.position / args.query_block) * list.pieces;
      own.seen = reinterpret_cast<const uint4*>(args.gathered.bits + row)[base + lane];
      if ((own.seen.x | own.seen.y | own.seen.z | own.seen.w) != 0)
        own.late = args.gathered.columns[list.columns + (base + lane) * kBlock + last_seen(own.seen)] > item.position;
    }
    return own;
  }

  // The list is read 32 entries at a time by the warp; an entry is issued when the next one is known, so that the last
  // can be marked. With kKeysAhead K runs one block ahead of V, as it is consumed. The next tile and the head of its
  // list are fetched while this one's blocks are on their way, or every tile would begin with three trips to memory.
  __device__ void run() {
    int ticket = 0, index = blockIdx.x;  // the first needs no trip to memory
    ForwardItem item = index < args.item_count ? args.items[index] : ForwardItem{};
    uint32_t head_entry = read_entry(item, lane);
    while (index < args.item_count) {
      const int kv_head = item.head / args.heads_per_kv;
      const int start = item.token - item.position + args.first_query;
      const bool dense = item.list_begin < 0;
      const int visible = (item.position + item.tokens - 1) / kKeys + 1;
      const int count = dense ? visible : item.list_count;
      if (lane == 0) ticket = gridDim.x + atomicAdd(args.counter, 1);
      ForwardItem next;
      int next_index = -1;
      auto fetch_next = [&] {
        next_index = __shfl_sync(~0u, ticket, 0);
        next = next_index < args.item_count ? args.items[next_index] : ForwardItem{};
      };

      int found = 0;
      Keys pending, second;  // second: the other half, with blocks of 64
      int previous_token = kNone, previous_second = kNone;
      uint4 pending_seen{0, 0, 0, 0};
      auto issue = [&](uint32_t last) {
        load_k(kv_head, pending, second, last, pending_seen);
        if constexpr (Smem::kGradient)
          if (previous_token == kNone) load_gradient(item);
        if constexpr (!Smem::kKeysAhead)
          load_v(kv_head, pending.token, second.token);
        else if (previous_token != kNone)
          load_v(kv_head, previous_token, previous_second);
        previous_token = pending.token;
        previous_second = second.token;
      };
      auto found_one = [&] {
        if (found == 0) announce(item, 0);
        if (found > 0) issue(0);
        if (found == 1) fetch_next();
        ++found;
      };
      Keys half;  // waits for another
      Pieces pieces;
      if (Smem::kGathered && item.gathered >= 0) pieces = read_pieces(item, 0);
      for (int base = 0; base < count; base += 32) {
        const int i = base + lane;
        uint32_t entry = head_entry;
        bool keep = i < count;
        if (dense) {
          // From the diagonal down: the masked block comes first, while the pipeline fills.
          entry = static_cast<uint32_t>(count - 1 - i);
        } else {
          if (base > 0) entry = read_entry(item, i);
          keep = keep && entry_id(entry) < static_cast<uint32_t>(visible) &&
                 static_cast<int>(entry_first(entry)) - item.query_token < item.tokens;
        }
        uint32_t kept = __ballot_sync(~0u, keep);
        while (kept != 0) {
          const int source = __ffs(kept) - 1;
          kept &= kept - 1;
          const uint32_t e = __shfl_sync(~0u, entry, source);
          const int key = static_cast<int>(entry_id(e)) * kKeys;
          const Keys keys{start + key, key - item.position,
                          dense ? 0 : static_cast<int>(entry_first(e)) - item.query_token};
          if (Smem::kHalves && half.token == kNone) {
            half = keys;
            continue;
          }
          found_one();
          pending = Smem::kHalves ? half : keys;
          second = keys;
          half.token = kNone;
        }
      }
      if (Smem::kHalves && half.token != kNone) {
        found_one();
        pending = half;
        second = {half.token, kNoHalf, 0};
      }
      if (Smem::kGathered && item.gathered >= 0) {
        const GatheredList& list = args.gathered.lists[item.gathered];
        for (int base = 0; base < list.pieces / 2; base += 32) {
          if (base > 0) pieces = read_pieces(item, base);
          uint32_t kept = __ballot_sync(~0u, (pieces.seen.x | pieces.seen.y | pieces.seen.z | pieces.seen.w) != 0);
          while (kept != 0) {
            const int source = __ffs(kept) - 1;
            kept &= kept - 1;
            found_one();
            pending_seen.x = __shfl_sync(~0u, pieces.seen.x, source);
            pending_seen.y = __shfl_sync(~0u, pieces.seen.y, source);
            pending_seen.z = __shfl_sync(~0u, pieces.seen.z, source);
            pending_seen.w = __shfl_sync(~0u, pieces.seen.w, source);
            pending = {~(static_cast<int>(list.columns) + (base + source) * kBlock),
                       step_kind(pending_seen, __shfl_sync(~0u, pieces.late, source)), 0};
            second = {kNone, kAllSeen, 0};
          }
        }
      }
      if (found == 0) announce(item, 1);
      if (found < 2) fetch_next();
      head_entry = read_entry(next, lane);
      if (found > 0) {
        issue(1);
        if constexpr (Smem::kKeysAhead) load_v(kv_head, pending.token, second.token);
      }
      item = next;
      index = next_index;
    }
    announce(ForwardItem{}, 2);
  }
};

// Barriers of such a kernel; eight computing warps give a buffer back.
template <typename Smem>
__device__ __forceinline__ void init_row_barriers(Smem& smem) {
  for (int i = 0; i < Smem::kSlots; ++i) {
    barrier_init(shared_address(&smem.q_full[i]), 1);
    barrier_init(shared_address(&smem.q_empty[i]), 8 * kArrivals);
  }
  if constexpr (Smem::kGradient) {
    barrier_init(shared_address(&smem.do_full), 1);
    barrier_init(shared_address(&smem.do_empty), 8 * kArrivals);
  }
  for (int i = 0; i < Smem::kStages; ++i) {
    barrier_init(shared_address(&smem.k_full[i]), 1);
    barrier_init(shared_address(&smem.k_empty[i]), 8 * kArrivals);
    barrier_init(shared_address(&smem.v_full[i]), 1);
    barrier_init(shared_address(&smem.v_empty[i]), 8 * kArrivals);
  }
  barrier_init_fence();
}

// Index of (token, head) of row `row` of subtile `sub` of a tile in the packed tensors, or -1 for padding.
__device__ __forceinline__ int64_t packed_row(const RowMap& rows, const ForwardItem& item, int sub, int row,
                                              int query_heads) {
  const int t = rows.token(row);
  const int in_tile = sub * rows.tokens + t;
  if (t >= rows.tokens || in_tile >= item.tokens) return -1;
  return static_cast<int64_t>(item.token + in_tile) * query_heads + item.head * rows.heads + (row - t * rows.heads);
}

}  // namespace sb::gpu
