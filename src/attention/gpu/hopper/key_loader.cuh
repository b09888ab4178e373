#pragma once

// The loading warp of the key-stationary backward: takes items from the queue, walks their columns (or the query blocks
// that see gathered columns), and feeds Q and dO, with their statistics, to the computing warpgroups. CUDA files only.

#include "attention/gpu/hopper/gathered.cuh"
#include "attention/gpu/hopper/tile.cuh"

namespace sb::gpu {

struct KeyItemMessage {
  BackwardItem item;
  int32_t end;
  int32_t unused[3];
};
// One step: a unit of `kUnit` subtiles of queries.
struct KeyStepMessage {
  int32_t diagonal;            // position of the first key minus position of the first query
  int32_t first[2];            // tokens of the unit before this one do not see the half of the keys
  int32_t subtile;             // first subtile of the unit among all; negative: the column ends
  uint32_t seen[kBlock / 32];  // of gathered columns: which of them the query block sees; `diagonal` is as in
                               // gathered.cuh, first[0] the position of the unit in its sequence where that matters
};
constexpr int32_t kGatheredItem = -1;  // column of an item of 128 gathered columns

struct KeyArguments {
  float scale;
  RowMap rows;
  int32_t query_block, kv_heads, subtiles;
  int32_t heads_per_kv;  // list heads of a key/value head
  int32_t columns;
  void *dk, *dv;
  bool adds;            // to fp32; else they are bf16 and written
  int32_t first_query;  // as in Shape
  const BackwardItem* items;
  const WorkCounts* counts;
  const int32_t* offsets;
  const uint32_t* entries;
  const float* statistics;
  float* dq_sum;
  float* partials;
  int32_t* counter;
  int32_t parts;       // of a group that share a list
  int32_t block_rows;  // subtiles of a query block
  int32_t tile;        // and of a tile
  GatheredColumns gathered;
  GatheredSums gathered_sums;
  float* sums;             // what they read, to be written
  int32_t* gathered_done;  // how often a warpgroup has written one
  // Where an item's keys begin, counted from the first query.
  __device__ int behind_first(const BackwardItem& item) const { return item.position - first_query; }
  __device__ int gathered_items() const { return gathered.piece_count / 2 * gathered_sums.parts; }
};

// kOdd: query blocks have an odd number of subtiles, of which a step takes two. The first of a query block comes
// together with the last of the one before, which does not see the keys then.
template <typename Smem, bool kGathered, bool kHalves, bool kOdd>
struct KeyLoader {
  static constexpr int D = Smem::kDim, kUnit = Smem::kUnit, kStages = Smem::kStages;
  Smem& smem;
  const CUtensorMap *q_map, *do_map, *k_map, *v_map, *gathered_k_map, *gathered_v_map;
  const KeyArguments& args;
  int lane;
  Cursor ring, keys;

  // Each lane issues one box; lane 0 first says how many bytes will come.
  __device__ void load_keys(const BackwardItem& item) {
    wait_keys();
    if (lane == 0) smem.item[keys.stage].item = item;
    load_boxes(k_map, v_map, item.head, item.token);
  }
  // Until there is room for them.
  __device__ void wait_keys() { barrier_wait(shared_address(&smem.kv_empty[keys.stage]), keys.phase ^ 1); }

  __device__ void load_boxes(const CUtensorMap* key_map, const CUtensorMap* value_map, int head, int token) {
    const uint32_t barrier = shared_address(&smem.kv_full[keys.stage]);
    if (lane == 0) {
      smem.item[keys.stage].end = 0;
      barrier_expect(barrier, 2 * kBlock * D * 2);
    }
    __syncwarp();
    constexpr int kBoxes = D / 64;
    if (lane < 2 * kBoxes) {
      const int c = lane % kBoxes;
      tensor_load(shared_address(lane < kBoxes ? smem.k[keys.stage] : smem.v[keys.stage]) + c * kBlock * 128,
                  lane < kBoxes ? key_map : value_map, c * 64, head, token, barrier);
    }
  }

  __device__ void load_rows(__nv_bfloat16* destination, const CUtensorMap* map, int head, int token, uint32_t barrier) {
    if (lane < kUnit * D / 64)
      tensor_load(shared_address(destination) + lane * kSubtileRows * 128, map, (lane % (D / 64)) * 64,
                  head * args.rows.heads, token + lane / (D / 64) * args.rows.tokens, barrier);
  }

  // Of gathered columns, lane `source` has `seen` and `kind`.
  // `begin`: first subtile of the sequence.
  __device__ void step(const BackwardItem& item, int head, int begin, int first, int second, int source = -1,
                       const uint4& seen = {}, int32_t kind = 0) {
    const int position = begin * args.rows.tokens;
    const int token = item.token - item.position + position;
    const int subtile = head * args.subtiles + item.subtile + begin + kOdd;  // odd: the arrays begin one earlier
    const uint32_t bytes = kUnit * args.rows.heads * args.rows.tokens * D * 2;
    const uint32_t q_barrier = shared_address(&smem.q_full[ring.stage]);
    barrier_wait(shared_address(&smem.q_empty[ring.stage]), ring.phase ^ 1);
    KeyStepMessage& message = smem.step[ring.stage];
    if (kGathered && source >= 0) {
      if (lane == source) {
        message.diagonal = kind;
        message.first[0] = message.first[1] = kind == kLateSeen ? position : 0;
        message.seen[0] = seen.x;
        message.seen[1] = seen.y;
        message.seen[2] = seen.z;
        message.seen[3] = seen.w;
      }
      __syncwarp();
    }
    if (lane == 0) {
      if (!kGathered || source < 0) {
        message.diagonal = args.behind_first(item) - position;
        message.first[0] = first;
        message.first[1] = second;
      }
      message.subtile = subtile;
      barrier_expect(q_barrier, bytes + sizeof(smem.statistics[0]));
      bulk_load(shared_address(smem.statistics[ring.stage]),
                args.statistics + static_cast<int64_t>(subtile) * 2 * kSubtileRows, sizeof(smem.statistics[0]),
                q_barrier);
    }
    __syncwarp();
    load_rows(smem.q[ring.stage], q_map, head, token, q_barrier);
    const uint32_t do_barrier = shared_address(&smem.do_full[ring.stage]);
    barrier_wait(shared_address(&smem.do_empty[ring.stage]), ring.phase ^ 1);
    if (lane == 0) barrier_expect(do_barrier, bytes);
    __syncwarp();
    load_rows(smem.d_o[ring.stage], do_map, head, token, do_barrier);
    ring.advance(kStages);
  }

  // The end of a column goes through the ring as a step without data.
  __device__ void end_column() {
    barrier_wait(shared_address(&smem.q_empty[ring.stage]), ring.phase ^ 1);
    barrier_wait(shared_address(&smem.do_empty[ring.stage]), ring.phase ^ 1);
    __syncwarp();  // or a lane that lags finds the phases after this one
    if (lane == 0) {
      smem.step[ring.stage].subtile = -1;
      barrier_arrive(shared_address(&smem.q_full[ring.stage]));
      barrier_arrive(shared_address(&smem.do_full[ring.stage]));
    }
    ring.advance(kStages);
  }

  // From the end of the sequence towards the diagonal: all key blocks that run beside each other start at the same
  // queries, and find each other's Q, dO and dQ in the L2.
  __device__ void walk_tiles(const BackwardItem& item, int head, int begin, int count) {
    const int first = begin * args.tile, end = min((begin + count) * args.tile, item.subtiles);
    for (int at = end - kUnit; at > first - kUnit; at -= kUnit)
      if ((at + kUnit) * args.rows.tokens > args.behind_first(item)) {
        const int hidden = kOdd && at < first ? args.rows.tokens : 0;
        step(item, head, at, hidden, hidden);
      }
  }

  __device__ void walk_entries(const BackwardItem& item, int head, const uint32_t* entries, int count) {
    const int unit_tokens = kUnit * args.rows.tokens;
    uint32_t next = entries[count - 1];
    for (int i = count - 1; i >= 0; --i) {
      const uint32_t entry = next;
      if (i > 0) next = entries[i - 1];
      const int begin = static_cast<int>(entry_id(entry)) * args.block_rows;
      for (int u = min(args.block_rows, item.subtiles - begin) - kUnit; u > -kUnit; u -= kUnit) {
        const int first = static_cast<int>(entry_first(entry)) - u * args.rows.tokens;
        if (first < unit_tokens && (begin + u) * args.rows.tokens + unit_tokens > args.behind_first(item))
          step(item, head, begin + u, first, first);
      }
    }
  }

  // Entries of a column before query block `end`.
  __device__ int entries_before(int at, int count, int end) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<int>(entry_id(args.entries[at + middle])) < end)
        low = middle + 1;
      else
        high = middle;
    }
    return at + low;
  }

  // Two columns of 64 keys at a time: query blocks from `begin` to `end` that see one or both. One of them may have to
  // compute what it does not see.
  __device__ void walk_halves(const BackwardItem& item, int head, int column, int begin, int end) {
    constexpr int kUnseen = 255;
    constexpr uint32_t kEnd = ~0u;
    const int unit_tokens = kUnit * args.rows.tokens, units = item.subtiles / kUnit;
    const int block_units = args.query_block / unit_tokens;
    int at[2] = {0, 0}, from[2] = {0, 0};
    uint32_t entry[2] = {kEnd, kEnd};
    const auto take = [&](int c) { entry[c] = at[c] > from[c] ? args.entries[--at[c]] : kEnd; };
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      from[c] = args.offsets[column + c];
      const int count = c == 0 || item.keys > kBlock / 2 ? args.offsets[column + c + 1] - from[c] : 0;
      at[c] = item.partial >= 0 ? entries_before(from[c], count, end) : from[c] + count;
      take(c);
    }
    for (;;) {
      const auto row = [&](int c) { return entry[c] == kEnd ? -1 : static_cast<int>(entry_id(entry[c])); };
      const int now = max(row(0), row(1));
      if (now < begin) break;
      int first[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        first[c] = kUnseen;
        if (row(c) != now) continue;
        first[c] = static_cast<int>(entry_first(entry[c]));
        take(c);  // the next is on its way while this one is worked on
      }
      const int base = now * block_units;
      for (int u = min(block_units, units - base) - 1; u >= 0; --u)
        if (min(first[0], first[1]) - u * unit_tokens < unit_tokens &&
            (base + u + 1) * unit_tokens > args.behind_first(item))
          step(item, head, (base + u) * kUnit, first[0] - u * unit_tokens, first[1] - u * unit_tokens);
    }
  }

  // 128 gathered columns against a part of the query blocks; they come before all key blocks, which add what they give.
  __device__ void walk_gathered(int index) {
    const int piece = index / args.gathered_sums.parts, part = index - piece * args.gathered_sums.parts;
    if (args.gathered.columns[static_cast<int64_t>(piece) * kBlock] == kNoColumn) {
      if (lane == 0) atomicAdd(args.gathered_done, 2);
      return;
    }
    const GatheredList& list = args.gathered.lists[args.gathered.pieces[2 * piece]];
    wait_keys();
    BackwardItem& item = smem.item[keys.stage].item;
    if (lane == 0) {
      item.token = piece * kBlock;
      item.position = item.token - list.token;  // so that the difference is where the sequence starts
      item.subtile = list.subtile;
      item.column = kGatheredItem;
      item.partial = index;
    }
    load_boxes(gathered_k_map, gathered_v_map, 0, piece * kBlock);
    keys.advance(Smem::kKeySlots);
    const int each = (list.rows + args.gathered_sums.parts - 1) / args.gathered_sums.parts;
    const int begin = part * each, end = min(begin + each, list.rows);
    const int units = args.query_block / (kUnit * args.rows.tokens);
    const uint64_t* bits = args.gathered.bits + list.bits + 2 * (piece - list.slot / 2);
    for (int head = list.head * args.parts; head < (list.head + 1) * args.parts; ++head)
      for (int base = end; base > begin; base -= 32) {
        const int row = base - 1 - lane;
        uint4 own{0, 0, 0, 0};
        if (row >= begin) own = *reinterpret_cast<const uint4*>(bits + static_cast<int64_t>(row) * list.pieces);
        int32_t kind = 0;
        if ((own.x | own.y | own.z | own.w) != 0)
          kind = step_kind(own, args.gathered.columns[static_cast<int64_t>(piece) * kBlock + last_seen(own)] >
                                    row * args.query_block);
        for (uint32_t kept = __ballot_sync(~0u, kind != 0); kept != 0; kept &= kept - 1) {
          const int source = __ffs(kept) - 1;
          for (int u = units - 1; u >= 0; --u) {
            const int unit = (base - 1 - source) * units + u;
            if (unit * kUnit * args.rows.tokens < list.tokens) step(item, head, unit * kUnit, 0, 0, source, own, kind);
          }
        }
      }
    end_column();
  }

  __device__ int next_index() {
    int index = 0;
    if (lane == 0) index = atomicAdd(args.counter, 1) + (kGathered ? 0 : static_cast<int>(gridDim.x));
    return __shfl_sync(~0u, index, 0);
  }

  __device__ void run() {
    const int gathered_items = kGathered ? args.gathered_items() : 0;
    const int item_count = args.counts->items + gathered_items;
    // The first needs no trip to memory. Where blocks wait for gathered items, every item is taken by a block that
    // runs: an item that belonged to one which has no multiprocessor yet would be waited for by all others.
    for (int index = kGathered ? next_index() : static_cast<int>(blockIdx.x); index < item_count;
         index = next_index()) {
      if (kGathered && index < gathered_items) {
        walk_gathered(index);
        continue;
      }
      load_keys(args.items[index - gathered_items]);
      const BackwardItem& item = smem.item[keys.stage].item;  // registers are scarce here
      keys.advance(Smem::kKeySlots);
      int before = 0;  // in the column
      for (int head = item.head * args.heads_per_kv; head < (item.head + 1) * args.heads_per_kv; ++head) {
        if (kHalves && !item.dense) {
          // A column is cut by query blocks.
          const int row = max(args.behind_first(item), 0) / args.query_block;
          const int rows = (item.subtiles + args.block_rows - 1) / args.block_rows - row;
          const int begin = max(item.begin - before, 0), end = min(item.begin + item.count - before, rows);
          before += rows;
          if (begin < end)
            walk_halves(item, head, head / args.parts * args.columns + item.column, row + begin, row + end);
          continue;
        }
        int at = max(args.behind_first(item), 0) / (args.tile * args.rows.tokens),
            count = item.subtiles / args.tile - at;
        if (!item.dense) {
          const int column = head / args.parts * args.columns + item.column;
          at = args.offsets[column];
          count = args.offsets[column + 1] - at;
        }
        const int begin = max(item.begin - before, 0), end = min(item.begin + item.count - before, count);
        before += count;
        if (begin >= end) continue;
        if (item.dense)
          walk_tiles(item, head, at + begin, end - begin);
        else
          walk_entries(item, head, args.entries + at + begin, end - begin);
      }
      end_column();
    }
    wait_keys();
    if (lane == 0) {
      smem.item[keys.stage].end = 1;
      barrier_arrive(shared_address(&smem.kv_full[keys.stage]));
    }
  }
};

}  // namespace sb::gpu
