// Checks selection on the device against fp64 masses, with a margin around ties. Exit status 0: all passed.

#include <algorithm>
#include <cmath>

#include "attention/selection/staircase.h"
#include "tests/attention/hopper/select_case.h"

namespace sb::hopper {
namespace {

constexpr double kMargin = 0.05;  // bf16 statistics and q², 16-bit scores
int failures = 0;

void fail(const char* what, int64_t a, int64_t b) {
  if (++failures < 20) std::printf(" FAILED: %s (%ld, %ld)", what, long(a), long(b));
}

struct Inputs {
  std::vector<__nv_bfloat16> q, k;
};

double value(const std::vector<__nv_bfloat16>& x, int64_t i) {
  return __bfloat162float(x[i]);
}

// Mean and variance of each channel of each block: [block][2][d].
std::vector<double> statistics_of(const Shape& shape, const Inputs& in, int begin, const SequenceTiles& t, int head) {
  const int d = shape.head_dim;
  std::vector<double> out(t.blocks() * 2 * d, 0);
  for (int64_t b = 0; b < t.blocks(); ++b) {
    const int64_t first = b * kBlock, last = std::min<int64_t>(t.tokens, first + kBlock);
    for (int c = 0; c < d; ++c) {
      double mean = 0, square = 0;
      for (int64_t i = first; i < last; ++i) mean += value(in.k, ((begin + i) * shape.kv_heads + head) * d + c);
      mean /= double(last - first);
      for (int64_t i = first; i < last; ++i) {
        const double x = value(in.k, ((begin + i) * shape.kv_heads + head) * d + c) - mean;
        square += x * x;
      }
      out[b * 2 * d + c] = mean;
      out[b * 2 * d + d + c] = square / double(last - first);
    }
  }
  return out;
}

// Log relative masses of the competing blocks for one token, the largest over the heads of the group.
std::vector<double> masses_of(const Shape& shape, const Inputs& in, const std::vector<double>& statistics, int token,
                              int head, int64_t competing) {
  const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads;
  std::vector<double> out(competing, -INFINITY), scores(competing);
  for (int g = 0; g < group; ++g) {
    const int64_t q = (int64_t(token) * shape.query_heads + head * group + g) * d;
    double top = -INFINITY, sum = 0;
    for (int64_t b = 0; b < competing; ++b) {
      double s = 0;
      for (int c = 0; c < d; ++c) {
        const double x = value(in.q, q + c) * shape.scale;
        s += x * statistics[b * 2 * d + c] + 0.5 * x * x * statistics[b * 2 * d + d + c];
      }
      scores[b] = s;
      top = std::max(top, s);
    }
    for (double s : scores) sum += std::exp(s - top);
    for (int64_t b = 0; b < competing; ++b) out[b] = std::max(out[b], scores[b] - top - std::log(sum));
  }
  return out;
}

void check_tile(const SequenceTiles& t, int64_t tile, int step, std::span<const uint32_t> entries,
                const std::vector<std::vector<double>>& masses) {
  const int64_t competing = t.competing(tile);
  std::vector<int> first(t.visible(tile), -1);
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t j = entry_id(entries[i]);
    if (j >= t.visible(tile) || (i > 0 && entry_id(entries[i - 1]) >= j)) return fail("ids", tile, j);
    first[j] = static_cast<int>(entry_first(entries[i]));
  }
  for (int64_t j = 0; j < t.visible(tile); ++j)
    if ((j >= competing || t.forced(tile, j)) && first[j] != 0) fail("forced block", tile, j);
  const StaircaseRule rule = staircase_rule(StaircaseRule::Kind::topk, t.free_quota(tile), step, t.query_block);
  if (t.candidates(tile) <= rule.total) {
    if (std::count(first.begin(), first.end(), 0) != t.visible(tile)) fail("everything", tile, 0);
    return;
  }
  int64_t chosen = 0;
  for (int row = 0; row < t.rows(tile); ++row) {
    const int64_t room = rule.allowed(row) - chosen;
    int64_t found = 0;
    double worst = INFINITY, missed = -INFINITY;
    for (int64_t j = 0; j < competing; ++j) {
      if (t.forced(tile, j)) continue;
      if (first[j] == row) {
        ++found;
        worst = std::min(worst, masses[row][j]);
      } else if (first[j] < 0 || first[j] > row) {
        missed = std::max(missed, masses[row][j]);
      }
    }
    if (found != std::max<int64_t>(room, 0)) fail("choices of a token", tile, row);
    if (found > 0 && worst < missed - kMargin) fail("a better block was left out", tile, row);
    chosen += found;
  }
}

void run(const char* name, int query_heads, int kv_heads, int d, const std::vector<int>& lengths,
         const std::vector<bool>& dense, int query_block, int64_t budget, int step,
         int stride = 1) {  // every stride-th query block is compared with fp64
  Shape shape{0, query_heads, kv_heads, d, 1.f / std::sqrt(float(d))};
  std::vector<int32_t> cu{0};
  std::vector<SequenceTiles> tiles;
  for (int length : lengths) {
    cu.push_back(cu.back() + length);
    tiles.push_back({length, kBlock, query_block, 1, 2, budget});
  }
  shape.tokens = cu.back();
  Tensors t(shape, 99);
  SelectCase select_case(shape, cu, dense, tiles, step);
  select_case.poison();
  select(select_case.params(shape, t.q.get(), t.k.get()), nullptr);
  must(cudaDeviceSynchronize(), "select");
  const RowLists lists = select_case.lists(shape);
  const int before = failures;
  std::printf("%-28s %zu entries", name, lists.entries.size());

  const Inputs in{t.q.host(), t.k.host()};
  for (int head = 0; head < kv_heads; ++head) {
    int row = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const SequenceTiles& tiling = tiles[s];
      const auto statistics = dense[s] ? std::vector<double>{} : statistics_of(shape, in, cu[s], tiling, head);
      for (int64_t tile = 0; tile < tiling.tiles(); ++tile, ++row) {
        const size_t at = size_t(head) * lists.rows + row;
        const std::span<const uint32_t> entries(lists.entries.data() + lists.offsets[at],
                                                lists.offsets[at + 1] - lists.offsets[at]);
        if (dense[s]) {
          if (!entries.empty()) fail("list of a dense sequence", s, tile);
          continue;
        }
        if (tile % stride != 0) continue;
        std::vector<std::vector<double>> masses;
        for (int r = 0; r < tiling.rows(tile); ++r)
          masses.push_back(
              masses_of(shape, in, statistics, cu[s] + int(tiling.begin(tile)) + r, head, tiling.competing(tile)));
        check_tile(tiling, tile, step, entries, masses);
      }
    }
  }
  const ColumnLists want = transpose(lists, cu);
  if (want.offsets != select_case.column_offsets.host()) fail("column offsets", 0, 0);
  if (want.entries != select_case.column_entries.host()) fail("column entries", 0, 0);

  // The future must not show: other keys and queries from token `change` of the first sequence on.
  const int change = lengths[0] * 2 / 3 + 5;
  Inputs other = in;
  for (int64_t i = int64_t(change) * query_heads * d; i < int64_t(cu[1]) * query_heads * d; ++i)
    other.q[i] = __float2bfloat16(2.f * __bfloat162float(in.q[i]) + 0.25f);
  for (int64_t i = int64_t(change) * kv_heads * d; i < int64_t(cu[1]) * kv_heads * d; ++i)
    other.k[i] = __float2bfloat16(-3.f * __bfloat162float(in.k[i]) + 0.5f);
  const DeviceArray<__nv_bfloat16> q(other.q), k(other.k);
  select_case.poison();
  select(select_case.params(shape, q.get(), k.get()), nullptr);
  must(cudaDeviceSynchronize(), "select");
  const RowLists changed = select_case.lists(shape);
  bool differs = false;
  for (int head = 0; head < kv_heads && !dense[0]; ++head)
    for (int64_t tile = 0; tile < tiles[0].tiles(); ++tile) {
      const size_t at = size_t(head) * lists.rows + tile;
      const int known = change - int(tiles[0].begin(tile));  // tokens of the tile that come before the change
      const auto seen = [&](const RowLists& l) {
        std::vector<uint32_t> out;
        for (int32_t i = l.offsets[at]; i < l.offsets[at + 1]; ++i)
          if (int(entry_first(l.entries[i])) < known) out.push_back(l.entries[i]);
        return out;
      };
      if (seen(lists) != seen(changed)) fail("the future shows", head, tile);
      differs = differs ||
                !std::equal(lists.entries.begin() + lists.offsets[at], lists.entries.begin() + lists.offsets[at + 1],
                            changed.entries.begin() + lists.offsets[at]);
    }
  if (!dense[0] && !differs) fail("the change changed nothing", 0, 0);
  std::printf(failures == before ? " ok\n" : "\n");
}

}  // namespace
}  // namespace sb::hopper

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  using sb::hopper::run;
  run("16:2 d128 4000", 16, 2, 128, {4000}, {false}, 16, 1200, 1);
  run("14:2 d64 mixed", 14, 2, 64, {3000, 500, 1, 2200}, {false, true, false, false}, 16, 1100, 1);
  run("8:2 d128 query block 32", 8, 2, 128, {2600, 900}, {false, false}, 32, 1000, 1);
  run("2:2 d64", 2, 2, 64, {3000}, {false}, 16, 900, 1);
  run("8:1 d64 70000", 8, 1, 64, {70000}, {false}, 128, 9000, 1, 40);
  run("8:1 d64 step 0", 8, 1, 64, {5000}, {false}, 16, 900, 0);
  run("8:1 d128 step 2", 8, 1, 128, {9001}, {false}, 16, 3300, 2);
  std::printf(sb::hopper::failures ? "%d FAILED\n" : "selection: all passed\n", sb::hopper::failures);
  return sb::hopper::failures ? 1 : 0;
}
