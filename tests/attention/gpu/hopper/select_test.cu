// Checks selection on the device against fp64 masses, with a margin around ties. Exit status 0: all passed.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <thread>

#include "attention/select/staircase.h"
#include "tests/attention/gpu/hopper/select_case.h"
#include "tests/device/software_device.h"

namespace sb::gpu {
namespace {

constexpr double kMargin = 0.06;  // bf16 statistics and q², 16-bit scores
double margin = kMargin;
int failures = 0, cases_run = 0;
std::string filter;  // only the cases whose name holds it

void fail(const char* what, int64_t a, int64_t b) {
  if (++failures < 20) std::printf(" FAILED: %s (%ld, %ld)", what, long(a), long(b));
}

struct Inputs {
  std::vector<__nv_bfloat16> q, k;
};

double value(const std::vector<__nv_bfloat16>& x, int64_t i) {
  return __bfloat162float(x[i]);
}

// The reference is most of the time.
void in_parallel(int count, const std::function<void(int)>& body) {
  std::atomic<int> next = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t)
    threads.emplace_back([&] {
      for (int i; (i = next++) < count;) body(i);
    });
  for (std::thread& thread : threads) thread.join();
}

// Mean and variance of each channel of each part of a block: [block][part][2][d].
std::vector<double> statistics_of(const Shape& shape, const Inputs& in, int begin, const SequenceTiles& t, int head,
                                  int parts) {
  const int d = shape.head_dim, part_tokens = t.block / parts;
  std::vector<double> out(t.blocks() * parts * 2 * d, 0);
  in_parallel(int(t.tokens / part_tokens), [&](int b) {
    const int64_t first = int64_t{b} * part_tokens, last = first + part_tokens;
    for (int c = 0; c < d; ++c) {
      double mean = 0, square = 0;
      for (int64_t i = first; i < last; ++i) mean += value(in.k, ((begin + i) * shape.kv_heads + head) * d + c);
      mean /= double(last - first);
      for (int64_t i = first; i < last; ++i) {
        const double x = value(in.k, ((begin + i) * shape.kv_heads + head) * d + c) - mean;
        square += x * x;
      }
      out[int64_t{b} * 2 * d + c] = mean;
      out[int64_t{b} * 2 * d + d + c] = square / double(last - first);
    }
  });
  return out;
}

// Log relative masses of the competing blocks for one token, the largest over the heads of the group.
std::vector<double> masses_of(const Shape& shape, const Inputs& in, const std::vector<double>& statistics, int token,
                              int head, int64_t competing, int parts, bool moments) {
  const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads;
  std::vector<double> out(competing, -INFINITY), scores(competing), query(d);
  for (int g = 0; g < group; ++g) {
    const int64_t q = (int64_t(token) * shape.query_heads + head * group + g) * d;
    double top = -INFINITY, sum = 0;
    for (int c = 0; c < d; ++c) query[c] = value(in.q, q + c) * shape.scale;
    for (int64_t b = 0; b < competing; ++b) {
      double mass = 0;
      for (int part = 0; part < parts; ++part) {
        const double* mean = statistics.data() + (b * parts + part) * 2 * d;
        double s = 0;
        for (int c = 0; c < d; ++c) {
          s += query[c] * mean[c];
          if (moments) s += 0.5 * query[c] * query[c] * mean[d + c];
        }
        mass += std::exp(s);
      }
      scores[b] = std::log(mass);
      top = std::max(top, scores[b]);
    }
    for (double s : scores) sum += std::exp(s - top);
    for (int64_t b = 0; b < competing; ++b) out[b] = std::max(out[b], scores[b] - top - std::log(sum));
  }
  return out;
}

// By planes: the channels that count of every key of a sequence, [token][channels].
std::vector<float> keys_of(const Shape& shape, const Inputs& in, const LayerPlanes& planes, int begin, int64_t tokens,
                           int head) {
  std::vector<float> out;
  out.reserve(tokens * planes.channels);
  for (int64_t t = 0; t < tokens; ++t)
    for (const int32_t c : planes.of(head))
      out.push_back(static_cast<float>(value(in.k, ((begin + t) * shape.kv_heads + head) * shape.head_dim + c)));
  return out;
}

// Log relative masses of the competing blocks for one token: the largest product of its mean query with a key.
std::vector<double> plane_masses_of(const Shape& shape, const Inputs& in, const LayerPlanes& planes,
                                    const std::vector<float>& keys, int token, int head, int64_t competing, int block) {
  const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads, channels = planes.channels;
  std::vector<double> query, out(competing);
  for (const int32_t c : planes.of(head)) {
    double sum = 0;
    for (int g = 0; g < group; ++g) sum += value(in.q, (int64_t(token) * shape.query_heads + head * group + g) * d + c);
    query.push_back(sum / group * planes.scale[head]);
  }
  double top = -INFINITY, sum = 0;
  for (int64_t b = 0; b < competing; ++b) {
    double best = -INFINITY;
    for (int i = 0; i < block; ++i) {
      const float* key = keys.data() + (b * block + i) * channels;
      double s = 0;
      for (int c = 0; c < channels; ++c) s += query[c] * key[c];
      best = std::max(best, s);
    }
    out[b] = best;
    top = std::max(top, best);
  }
  for (const double s : out) sum += std::exp(s - top);
  for (double& s : out) s -= top + std::log(sum);
  return out;
}

// Whether the selections of one query block are right, up to near ties: each token's against its own masses.
void check_tile(const SequenceTiles& t, int64_t tile, const SelectionConfig& config, float threshold,
                std::span<const uint32_t> entries, const std::vector<std::vector<double>>& masses) {
  const int64_t competing = t.competing(tile), candidates = t.candidates(tile);
  const int fine = std::min(t.block, kBlock), expand = t.block / fine;
  const int64_t visible = (t.end(tile) - 1) / fine + 1;
  std::vector<int> listed(visible, -1), first(t.visible(tile), -1);
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t j = entry_id(entries[i]);
    if (j >= visible || (i > 0 && entry_id(entries[i - 1]) >= j)) return fail("ids", tile, j);
    listed[j] = static_cast<int>(entry_first(entries[i]));
  }
  for (int64_t j = 0; j < visible; ++j) {
    first[j / expand] = listed[j];
    if (listed[j] != listed[j / expand * expand]) return fail("halves of a block differ", tile, j);
  }
  const bool window = config.pattern == SelectionPattern::window;
  if (window) {
    std::vector<IndexEntry> want;
    select_window(t, tile, want);
    std::vector<int> expected(t.visible(tile), -1);
    for (const IndexEntry& entry : want) expected[entry.block] = 0;
    if (expected != first) fail("window", tile, 0);
    return;
  }
  for (int64_t j = 0; j < t.visible(tile); ++j)
    if ((j >= competing || t.forced(tile, j)) && first[j] != 0) fail("forced block", tile, j);
  const bool lookahead = config.order == SelectionOrder::lookahead;
  const auto kind = config.pattern == SelectionPattern::topk   ? StaircaseRule::Kind::topk
                    : config.pattern == SelectionPattern::topp ? StaircaseRule::Kind::topp
                                                               : StaircaseRule::Kind::mass;
  StaircaseRule rule = staircase_rule(kind, t.free_quota(tile), config.step, lookahead ? 1 : t.query_block);
  if (kind == StaircaseRule::Kind::mass) rule.first = rule.total = 2 * t.free_quota(tile);
  if (kind == StaircaseRule::Kind::topk && candidates <= rule.total) {
    if (std::count(first.begin(), first.end(), 0) != t.visible(tile)) fail("everything", tile, 0);
    return;
  }
  int64_t selected = 0;
  for (int row = 0; row < static_cast<int>(masses.size()); ++row) {
    const int64_t room = std::max<int64_t>(0, std::min(rule.allowed(row), candidates) - selected);
    int64_t found = 0;
    double worst = INFINITY, missed = -INFINITY, held_before = 0, held = 0, all = 0, last = 0;
    for (int64_t j = 0; j < competing; ++j) {
      const double mass = std::exp(masses[row][j]);
      all += mass;
      if (first[j] >= 0 && (t.forced(tile, j) || first[j] < row)) held_before += mass;
      if (t.forced(tile, j)) continue;
      if (first[j] == row) {
        ++found;
        held += mass;
        if (masses[row][j] < worst) last = mass;
        worst = std::min(worst, masses[row][j]);
      } else if (first[j] < 0 || first[j] > row) {
        missed = std::max(missed, masses[row][j]);
      }
    }
    if (found > room) fail("more than allowed", tile, row);
    if (found > 0 && worst < missed - margin) fail("a better block was left out", tile, row);
    if (kind == StaircaseRule::Kind::topk && found != room) fail("selections of a token", tile, row);
    const double slack = 0.03 * all;  // of sums of 16-bit masses
    if (kind == StaircaseRule::Kind::topp) {
      const double wanted = config.coverage * all;
      if (found < room && held_before + held < wanted - slack) fail("coverage not reached", tile, row);
      if (found > 0 && held_before + held - last > wanted + slack) fail("more than coverage asks for", tile, row);
    }
    if (kind == StaircaseRule::Kind::mass) {
      const int64_t floor = row == 0 ? std::min<int64_t>((t.free_quota(tile) + 3) / 4, room) : 0;
      if (found < floor) fail("less than the floor", tile, row);
      if (found > floor && worst < threshold - margin) fail("below the threshold", tile, row);
      if (found < room && missed > threshold + margin) fail("above the threshold but left out", tile, row);
    }
    selected += found;
  }
}

// `mass` with look-ahead: nothing left out may be better than what was selected anywhere in the sequence.
struct MostMass {
  int64_t wanted = 0, found = 0;
  double worst = INFINITY, missed = -INFINITY;

  void add(const SequenceTiles& t, int64_t tile, std::span<const uint32_t> entries, const std::vector<double>& masses) {
    const int expand = t.block / std::min(t.block, kBlock);
    std::vector<bool> selected(t.visible(tile), false);
    for (const uint32_t entry : entries) {
      if (entry_first(entry) != 0) fail("first token with look-ahead", tile, entry_id(entry));
      selected[entry_id(entry) / expand] = true;
    }
    wanted += std::min(t.free_quota(tile), t.candidates(tile));
    for (int64_t j = 0; j < t.visible(tile); ++j) {
      if (j >= t.competing(tile) || t.forced(tile, j)) {
        if (!selected[j]) fail("forced block", tile, j);
      } else if (selected[j]) {
        ++found;
        worst = std::min(worst, masses[j]);
      } else {
        missed = std::max(missed, masses[j]);
      }
    }
  }
  void check() const {
    if (found != wanted) fail("number of selections", found, wanted);
    if (worst < missed - margin) fail("a better pair was left out", found, wanted);
  }
};

struct Options {
  SelectionPattern pattern = SelectionPattern::topk;
  SelectionOrder order = SelectionOrder::causal;
  BlockScore score = BlockScore::moments;
  int block = kBlock;
  int score_tokens = 0;
  int score_channels = 32;
  int step = 1;
  float threshold = 0;
  int stride = 1;  // every stride-th query block is compared with fp64
  int64_t batch_masses = int64_t{1} << 26;
  int shared_memory = 0;  // of a thread block that selects, as if the GPU had no more
  // The keys of the first sixteen blocks are so unlike all queries that the others' exponentials, relative to theirs,
  // overflow; 16 bits are less precise there.
  bool far_apart = false;
  float key_offset = 0;  // what all keys have in common, in every channel
};

void run(const char* name, bool hopper, int query_heads, int kv_heads, int d, const std::vector<int>& lengths,
         const std::vector<bool>& dense, int query_block, int64_t budget, const Options& options = {}) {
  if (std::string(name).find(filter) == std::string::npos) return;
  ++cases_run;
  Shape shape{0, query_heads, kv_heads, d, 1.f / std::sqrt(float(d))};
  SelectionConfig config;
  config.pattern = options.pattern;
  config.order = options.order;
  config.score = options.score;
  config.block = options.block;
  config.score_tokens = options.score_tokens;
  config.score_channels = options.score_channels;
  config.query_block = query_block;
  config.budget = budget;
  config.step = options.step;
  config.coverage = 0.8;
  std::vector<int32_t> cu{0};
  std::vector<SequenceTiles> tiles;
  for (int length : lengths) {
    cu.push_back(cu.back() + length);
    tiles.push_back({length, options.block, query_block, 1, 2, budget});
  }
  shape.tokens = cu.back();
  Tensors t(shape, 99);
  margin = options.far_apart ? 0.15 : kMargin;
  if (options.far_apart) {
    std::vector<__nv_bfloat16> q = t.q.host(), k = t.k.host();
    for (size_t i = 0; i < q.size(); i += d) q[i] = __float2bfloat16(30.f);
    for (int64_t i = 0; i < int64_t{16} * options.block * kv_heads * d; i += d) k[i] = __float2bfloat16(-25.f);
    t.q = DeviceArray<__nv_bfloat16>(q);
    t.k = DeviceArray<__nv_bfloat16>(k);
  }
  if (options.key_offset != 0) {
    std::vector<__nv_bfloat16> k = t.k.host();
    for (__nv_bfloat16& x : k) x = __float2bfloat16(__bfloat162float(x) + options.key_offset);
    t.k = DeviceArray<__nv_bfloat16>(k);
  }
  // Mean queries are short: with a larger scale blocks are far enough apart to be told by 16 bits.
  const bool by_planes = config.judges_by_planes();
  const LayerPlanes planes =
      by_planes ? made_up_planes(shape, options.score_channels, (options.far_apart ? 1 : 8) * shape.scale,
                                 options.key_offset != 0 ? options.key_offset : 0.25f)
                : LayerPlanes{};
  SelectCase select_case(shape, cu, dense, tiles, config, hopper, options.batch_masses, options.threshold, planes);
  select_case.shared_memory = options.shared_memory;
  select_case.poison();
  select_case.run(shape, t.q.get(), t.k.get());
  must(cudaDeviceSynchronize(), "select");
  const RowLists lists = select_case.lists(shape);
  const int before = failures;
  std::printf("%-8s %-34s %zu entries, %zu batches", hopper ? "hopper" : "portable", name, lists.entries.size(),
              select_case.plan.batches.size());

  const Inputs in{t.q.host(), t.k.host()};
  const bool most_mass = options.pattern == SelectionPattern::mass && options.order == SelectionOrder::lookahead;
  unsigned long long blocks = 0, pairs = 0;
  for (int head = 0; head < kv_heads; ++head) {
    int row = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      const SequenceTiles& tiling = tiles[s];
      MostMass most;
      const int parts = select_case.plan.parts;
      const auto statistics =
          dense[s] || by_planes ? std::vector<double>{} : statistics_of(shape, in, cu[s], tiling, head, parts);
      const auto keys =
          dense[s] || !by_planes ? std::vector<float>{} : keys_of(shape, in, planes, cu[s], tiling.tokens, head);
      // Of every token, or of the query block as a whole: of all that are compared.
      std::vector<std::vector<std::vector<double>>> all_masses(dense[s] ? 0 : tiling.tiles() / options.stride + 1);
      in_parallel(int(all_masses.size()), [&](int i) {
        const int64_t tile = int64_t{i} * options.stride;
        if (tile >= tiling.tiles()) return;
        std::vector<std::vector<double>>& masses = all_masses[i];
        for (int r = 0; r < tiling.rows(tile); ++r) {
          const int token = cu[s] + int(tiling.begin(tile)) + r;
          const int64_t competing = tiling.competing(tile);
          masses.push_back(by_planes ? plane_masses_of(shape, in, planes, keys, token, head, competing, tiling.block)
                                     : masses_of(shape, in, statistics, token, head, competing, parts,
                                                 options.score == BlockScore::moments));
        }
        if (options.order != SelectionOrder::lookahead) return;
        std::vector<double> sums(tiling.competing(tile), 0);
        for (const auto& token : masses)
          for (size_t j = 0; j < sums.size(); ++j) sums[j] += std::exp(token[j]);
        for (double& sum : sums) sum = std::log(sum);
        masses = {sums};
      });
      for (int64_t tile = 0; tile < tiling.tiles(); ++tile, ++row) {
        const size_t at = size_t(head) * lists.rows + row;
        const std::span<const uint32_t> entries(lists.entries.data() + lists.offsets[at],
                                                lists.offsets[at + 1] - lists.offsets[at]);
        if (dense[s]) {
          if (!entries.empty()) fail("list of a dense sequence", s, tile);
          continue;
        }
        for (const uint32_t entry : entries) {
          const int64_t key = int64_t{entry_id(entry)} * lists.block;
          blocks += key % tiling.block == 0;
          for (int64_t p = tiling.begin(tile) + entry_first(entry); p < tiling.end(tile); ++p)
            pairs += std::clamp<int64_t>(p - key + 1, 0, lists.block);
        }
        if (tile % options.stride != 0) continue;
        const std::vector<std::vector<double>>& masses = all_masses[tile / options.stride];
        if (most_mass)
          most.add(tiling, tile, entries, masses[0]);
        else
          check_tile(tiling, tile, config, options.threshold, entries, masses);
      }
      if (most_mass && !dense[s]) most.check();
    }
  }
  const ColumnLists want = transpose(lists, cu);
  auto offsets = select_case.column_offsets.host();
  auto column_entries = select_case.column_entries.host();
  column_entries.resize(want.entries.size());
  if (want.offsets != offsets) fail("column offsets", 0, 0);
  if (want.entries != column_entries) fail("column entries", 0, 0);
  if (options.pattern != SelectionPattern::topk) {
    const auto counted = select_case.selected.host();
    unsigned long long found_blocks = 0, found_pairs = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      found_blocks += counted[2 * s];
      found_pairs += counted[2 * s + 1];
    }
    if (found_blocks != blocks) fail("count of blocks", found_blocks, blocks);
    if (found_pairs != pairs) fail("count of pairs", found_pairs, pairs);
  } else {
    int64_t dense_pairs = 0;
    for (size_t s = 0; s < lengths.size(); ++s)
      if (dense[s]) dense_pairs += int64_t{kv_heads} * lengths[s] * (lengths[s] + 1) / 2;
    if (select_case.plan.token_pairs != static_cast<int64_t>(pairs) + dense_pairs)
      fail("pairs known beforehand", select_case.plan.token_pairs, pairs);
  }
  const bool forward_looking = options.order == SelectionOrder::lookahead;
  if (!forward_looking && options.pattern != SelectionPattern::window) {
    // The future must not show: other keys and queries from token `change` of the first sequence on.
    const int change = lengths[0] * 2 / 3 + 5;
    Inputs other = in;
    for (int64_t i = int64_t(change) * query_heads * d; i < int64_t(cu[1]) * query_heads * d; ++i)
      other.q[i] = __float2bfloat16(2.f * __bfloat162float(in.q[i]) + 0.25f);
    for (int64_t i = int64_t(change) * kv_heads * d; i < int64_t(cu[1]) * kv_heads * d; ++i)
      other.k[i] = __float2bfloat16(-3.f * __bfloat162float(in.k[i]) + 0.5f);
    const DeviceArray<__nv_bfloat16> q(other.q), k(other.k);
    select_case.poison();
    select_case.run(shape, q.get(), k.get());
    must(cudaDeviceSynchronize(), "select");
    const RowLists changed = select_case.lists(shape);
    bool differs = false;
    for (int head = 0; head < kv_heads && !dense[0]; ++head)
      for (int64_t tile = 0; tile < tiles[0].tiles(); ++tile) {
        const size_t at = size_t(head) * lists.rows + tile;
        const int known = change - int(tiles[0].begin(tile));  // tokens of the tile that come before the change
        const auto seen = [&](const RowLists& l, int limit) {
          std::vector<uint32_t> out;
          for (int32_t i = l.offsets[at]; i < l.offsets[at + 1]; ++i)
            if (int(entry_first(l.entries[i])) < limit) out.push_back(l.entries[i]);
          return out;
        };
        if (seen(lists, known) != seen(changed, known)) fail("the future shows", head, tile);
        differs = differs || seen(lists, 1000) != seen(changed, 1000);
      }
    if (!dense[0] && !differs) fail("the change changed nothing", 0, 0);
  }
  std::printf(failures == before ? " ok\n" : "\n");
}

}  // namespace
}  // namespace sb::gpu

// --short leaves out the longest, for the memory checker; a second argument keeps only the cases whose name holds it,
// for the slower one of races.
int main(int argc, char** argv) {
  using namespace sb;
  using gpu::Options;
  using gpu::run;
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  const bool small = test::smaller_on_software_device("without the sequences of 70000 tokens and more");
  const bool full = !small && (argc < 2 || std::string(argv[1]) != "--short");
  if (argc > 2) gpu::filter = argv[2];
  const auto topp = SelectionPattern::topp, mass = SelectionPattern::mass, window = SelectionPattern::window;
  const auto ahead = SelectionOrder::lookahead;
  const auto planes = BlockScore::planes;
  for (const bool hopper : {true, false}) {
    run("16:2 d128 4000", hopper, 16, 2, 128, {4000}, {false}, 16, 1200);
    run("14:2 d64 mixed", hopper, 14, 2, 64, {3000, 500, 1, 2200}, {false, true, false, false}, 16, 1100);
    run("8:2 d128 query block 32", hopper, 8, 2, 128, {2600, 900}, {false, false}, 32, 1000);
    run("2:2 d64", hopper, 2, 2, 64, {3000}, {false}, 16, 900);
    run("4:2 d64", hopper, 4, 2, 64, {3000, 1300}, {false, false}, 64, 900);
    run("16:1 d128", hopper, 16, 1, 128, {2500}, {false}, 16, 900);
    run("8:1 d64 step 0", hopper, 8, 1, 64, {5000}, {false}, 16, 900, {.step = 0});
    run("8:1 d128 step 2", hopper, 8, 1, 128, {9001}, {false}, 16, 3300, {.step = 2});
    run("8:2 d64 mean", hopper, 8, 2, 64, {3000}, {false}, 16, 900, {.score = BlockScore::mean});
    run("8:2 d64 blocks of 256", hopper, 8, 2, 64, {6000, 300}, {false, false}, 16, 2600, {.block = 256});
    run("8:2 d64 small batches", hopper, 8, 2, 64, {4000}, {false}, 16, 900, {.batch_masses = 10000});
    run("8:2 d64 topp", hopper, 8, 2, 64, {4000, 700}, {false, true}, 16, 2000, {.pattern = topp});
    run("8:2 d64 mass", hopper, 8, 2, 64, {4000, 2500}, {false, false}, 16, 900, {.pattern = mass, .threshold = -3.f});
    run("8:2 d64 mass, high", hopper, 8, 2, 64, {4000}, {false}, 16, 900, {.pattern = mass, .threshold = -1.f});
    run("8:2 d64 window", hopper, 8, 2, 64, {4000}, {false}, 16, 900, {.pattern = window});
    run("8:2 d64 lookahead", hopper, 8, 2, 64, {4000}, {false}, 32, 900, {.order = ahead});
    run("8:2 d64 lookahead topp", hopper, 8, 2, 64, {4000}, {false}, 32, 2000, {.pattern = topp, .order = ahead});
    run("8:2 d64 lookahead mass", hopper, 8, 2, 64, {4000, 300, 2700}, {false, true, false}, 16, 900,
        {.pattern = mass, .order = ahead});
    run("8:1 d128 lookahead mass, batches", hopper, 8, 1, 128, {5000}, {false}, 64, 1100,
        {.pattern = mass, .order = ahead, .batch_masses = 20000});
    run("8:2 d64 lookahead mass, little memory", hopper, 8, 2, 64, {4000, 2700}, {false, false}, 16, 900,
        {.pattern = mass, .order = ahead, .shared_memory = 100});
    run("8:2 d64 far apart", hopper, 8, 2, 64, {4000}, {false}, 16, 900, {.far_apart = true});
    run("7:1 d128 far apart", hopper, 7, 1, 128, {6000}, {false}, 16, 1500, {.far_apart = true});
    // Blocks judged by parts; every third or fifth query block against fp64.
    run("16:2 d128 parts of 32", hopper, 16, 2, 128, {4000}, {false}, 16, 1200, {.score_tokens = 32, .stride = 3});
    run("14:2 d64 parts of 64, mixed", hopper, 14, 2, 64, {3000, 500, 1, 2200}, {false, true, false, false}, 16, 1100,
        {.score_tokens = 64, .stride = 3});
    run("14:2 d64 parts of 16", hopper, 14, 2, 64, {3100}, {false}, 16, 900, {.score_tokens = 16, .stride = 5});
    run("2:2 d128 single keys", hopper, 2, 2, 128, {2500}, {false}, 16, 900, {.score_tokens = 1, .stride = 5});
    run("8:1 d64 single keys", hopper, 8, 1, 64, {9300}, {false}, 16, 1500, {.score_tokens = 1, .stride = 40});
    run("16:1 d64 parts of 2", hopper, 16, 1, 64, {2000}, {false}, 16, 700, {.score_tokens = 2, .stride = 5});
    run("4:1 d128 means of 16", hopper, 4, 1, 128, {3000}, {false}, 16, 900,
        {.score = BlockScore::mean, .score_tokens = 16, .stride = 3});
    run("8:2 d64 parts of 32 of 256", hopper, 8, 2, 64, {6000, 300}, {false, false}, 16, 2600,
        {.block = 256, .score_tokens = 32, .stride = 5});
    run("8:2 d64 topp, single keys", hopper, 8, 2, 64, {3000}, {false}, 16, 1500,
        {.pattern = topp, .score_tokens = 1, .stride = 5});
    run("8:2 d64 mass, parts of 8", hopper, 8, 2, 64, {3000}, {false}, 16, 900,
        {.pattern = mass, .score_tokens = 8, .threshold = -3.f, .stride = 5});
    run("8:2 d64 lookahead, parts of 32", hopper, 8, 2, 64, {3000}, {false}, 32, 900,
        {.order = ahead, .score_tokens = 32, .stride = 3});
    // Blocks judged by planes.
    run("planes 16:2 d128", hopper, 16, 2, 128, {4000}, {false}, 16, 1200, {.score = planes, .stride = 3});
    run("planes 14:2 d64, mixed", hopper, 14, 2, 64, {3000, 500, 1, 2207}, {false, true, false, false}, 16, 1100,
        {.score = planes, .stride = 3});
    run("planes 2:2 d128, long items", hopper, 2, 2, 128, {9001}, {false}, 16, 900, {.score = planes, .stride = 40});
    run("planes 4:2 d64 blocks of 256", hopper, 4, 2, 64, {9000, 300}, {false, false}, 32, 2600,
        {.score = planes, .block = 256, .stride = 5});
    run("planes 8:1 d128 blocks of 64", hopper, 8, 1, 128, {3001}, {false}, 16, 700,
        {.score = planes, .block = 64, .stride = 3});
    run("planes 8:1 d128 16 channels", hopper, 8, 1, 128, {3000}, {false}, 16, 900,
        {.score = planes, .score_channels = 16, .stride = 5});
    run("planes 8:1 d64 all 64 channels", hopper, 8, 1, 64, {3000}, {false}, 16, 900,
        {.score = planes, .score_channels = 64, .stride = 5});
    run("planes 8:2 d128 48 channels", hopper, 8, 2, 128, {3000}, {false}, 16, 900,
        {.score = planes, .score_channels = 48, .stride = 5});
    run("planes 8:1 d128 all 128 channels", hopper, 8, 1, 128, {3000}, {false}, 64, 900,
        {.score = planes, .score_channels = 128, .stride = 5});
    run("planes 80:2 d64", hopper, 80, 2, 64, {2000}, {false}, 16, 700, {.score = planes, .stride = 5});
    run("planes 8:2 d64 small batches", hopper, 8, 2, 64, {4000}, {false}, 16, 900,
        {.score = planes, .stride = 3, .batch_masses = 10000});
    run("planes 8:2 d64 topp", hopper, 8, 2, 64, {4000, 700}, {false, true}, 16, 2000,
        {.pattern = topp, .score = planes, .stride = 3});
    run("planes 14:2 d64 mass", hopper, 14, 2, 64, {4000, 2500}, {false, false}, 16, 900,
        {.pattern = mass, .score = planes, .threshold = -3.f, .stride = 3});
    run("planes 8:2 d128 lookahead", hopper, 8, 2, 128, {4000}, {false}, 32, 900,
        {.order = ahead, .score = planes, .stride = 3});
    run("planes 8:2 d64 lookahead mass", hopper, 8, 2, 64, {2500, 300}, {false, true}, 16, 900,
        {.pattern = mass, .order = ahead, .score = planes});
    run("planes 7:1 d64 far apart", hopper, 7, 1, 64, {6000}, {false}, 16, 1500,
        {.score = planes, .stride = 3, .far_apart = true});
    run("planes 8:1 d64 keys with an offset", hopper, 8, 1, 64, {3000}, {false}, 16, 900,
        {.score = planes, .stride = 3, .key_offset = 100});
    run("8:2 d64 lookahead mass, parts of 64", hopper, 8, 2, 64, {2500, 300}, {false, true}, 16, 900,
        {.pattern = mass, .order = ahead, .score_tokens = 64});
  }
  run("32:1 d64", true, 32, 1, 64, {3000}, {false}, 16, 900, {.stride = 3});
  run("40:2 d128, batches", true, 40, 2, 128, {2500, 1300}, {false, false}, 16, 900,
      {.stride = 3, .batch_masses = 30000});
  run("34:2 d64 single keys", true, 34, 2, 64, {1500}, {false}, 16, 700, {.score_tokens = 1, .stride = 9});
  run("32:1 d64 lookahead mass", true, 32, 1, 64, {2500}, {false}, 16, 900, {.pattern = mass, .order = ahead});
  run("32:1 d64 blocks of 64", false, 32, 1, 64, {2000}, {false}, 16, 600, {.block = 64});
  // More blocks than a lane holds four pairs of.
  run("8:1 d64 40000 topp", true, 8, 1, 64, {40000}, {false}, 128, 5000, {.pattern = topp, .stride = 30});
  run("8:1 d64 40000 mass", true, 8, 1, 64, {40000}, {false}, 128, 5000,
      {.pattern = mass, .threshold = -5.f, .stride = 30});
  if (full) {
    // Scores that wait beyond the shared memory.
    run("planes 16:2 d128 100000", true, 16, 2, 128, {100000}, {false}, 16, 10000, {.score = planes, .stride = 1500});
    run("planes 2:1 d64 150000 mass", true, 2, 1, 64, {150000}, {false}, 16, 9000,
        {.pattern = mass, .score = planes, .threshold = -5.5f, .stride = 2500});
    run("2:1 d64 100000 topp", true, 2, 1, 64, {100000}, {false}, 128, 20000, {.pattern = topp, .stride = 90});
    run("2:1 d64 100000 mass", true, 2, 1, 64, {100000}, {false}, 128, 9000,
        {.pattern = mass, .threshold = -5.5f, .stride = 90});
    // Masses that fit neither registers nor shared memory.
    run("2:1 d64 200000 little memory", true, 2, 1, 64, {200000}, {false}, 128, 20000,
        {.stride = 200, .shared_memory = 2000});
    run("32:1 d64 150000 little memory topp", true, 32, 1, 64, {150000}, {false}, 128, 20000,
        {.pattern = topp, .stride = 300, .shared_memory = 2000});
    run("2:1 d64 150000 little memory mass", true, 2, 1, 64, {150000}, {false}, 128, 9000,
        {.pattern = mass, .threshold = -5.5f, .stride = 200, .shared_memory = 2000});
    run("2:1 d64 150000 little memory ahead", true, 2, 1, 64, {150000}, {false}, 128, 20000,
        {.order = ahead, .stride = 200, .shared_memory = 2000});
    run("8:1 d64 70000", true, 8, 1, 64, {70000}, {false}, 128, 9000, {.stride = 40});
    run("8:1 d128 200000", true, 8, 1, 128, {200000}, {false}, 128, 20000, {.stride = 200});
    run("8:1 d128 100000 parts of 64", true, 8, 1, 128, {100000}, {false}, 16, 10000,
        {.score_tokens = 64, .stride = 2000});
    run("1:1 d64 900000 blocks of 64", false, 1, 1, 64, {900000}, {false}, 128, 9000, {.block = 64, .stride = 2000});
    run("8:1 d64 524288 topp", true, 8, 1, 64, {524288}, {false}, 128, 30000, {.pattern = topp, .stride = 500});
  }
  if (gpu::cases_run == 0) {
    std::printf("no case has %s in its name\n", argv[2]);
    ++gpu::failures;
  }
  std::printf(gpu::failures ? "%d FAILED\n" : "selection: all passed\n", gpu::failures);
  return gpu::failures ? 1 : 0;
}
