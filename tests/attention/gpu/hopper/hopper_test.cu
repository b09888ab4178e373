// Checks the attention kernels against fp64: the Hopper ones (on an SM90 GPU), the portable ones in bf16 and in fp32.
// Exit status 0: all passed.

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "tests/attention/gpu/hopper/flash_model.h"
#include "tests/device/software_device.h"

namespace sb::gpu {
namespace {

struct Case {
  std::string name;
  int query_heads, kv_heads, d;
  std::vector<int> lengths;
  std::vector<bool> dense;  // empty: all dense
  ListOptions lists{};
  bool hopper = true;  // a case that the Hopper kernels take
};

struct ErrorOf {
  double relative = 0, largest = 0;  // Frobenius; largest difference over the root mean square of the reference
};

template <typename T>
double as_double(T x) {
  return double(x);
}
template <>
double as_double(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
ErrorOf compare(const std::vector<T>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double x = as_double(got[i]);
    if (std::isinf(want[i]) && x == want[i]) continue;
    const double d = std::abs(x - want[i]);
    if (!(d < 1e30)) return {INFINITY, INFINITY};  // NaN too
    difference += d * d;
    norm += want[i] * want[i];
    largest = std::max(largest, d);
  }
  if (norm == 0) return {difference == 0 ? 0 : INFINITY, largest};
  return {std::sqrt(difference / norm), largest / std::sqrt(norm / want.size())};
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

int failures = 0;
bool small = false;  // a software device: a third of the tokens, which is still several blocks
int tokens_of(int length) {
  return small && length > kBlock ? std::max(length / 3, kBlock + 1) : length;
}

void expect(const Case& c, const char* what, ErrorOf error, double relative, double largest) {
  const bool good = error.relative <= relative && error.largest <= largest;
  std::printf(" %s %.1e/%.1e%s", what, error.relative, error.largest, good ? "" : " FAILED");
  if (!good) ++failures;
  (void)c;
}

// What the device made of the columns: every entry (or dense tile) in exactly one item, every key written once, falling
// cost within each head.
void check_order(const Case& c, const Shape& shape, const DeviceWork& w) {
  const auto items = w.backward.host();
  const auto splits = w.splits.host();
  const WorkCounts counts = w.counts.host()[0];
  const Work& work = w.work;
  bool good = counts.items <= work.limits.items && counts.splits <= work.limits.splits;
  const int heads_per_kv = shape.query_heads / shape.kv_heads / work.tiling.heads;
  std::vector<std::vector<std::pair<int, int>>> parts(work.places.size());
  std::vector<int> slots(work.limits.slots, 0), written(work.places.size(), 0);
  int64_t cost_before = 0;
  for (int i = 0; good && i < counts.items; ++i) {
    const BackwardItem& item = items[i];
    const size_t at = static_cast<size_t>(item.head) * work.columns + item.column;
    good = good && item.token == work.places[at].token && item.head == work.places[at].head;
    parts[at].emplace_back(item.begin, item.count);
    if (item.partial < 0)
      ++written[at];
    else
      ++slots[item.partial];
    const int64_t each = item.dense ? 2 : work.tiling.query_block / work.tiling.tokens, cost = item.count * each;
    if (i > 0 && items[i - 1].head == item.head) {
      // To within a bucket, and the last part of a split column may be short.
      if (item.partial < 0 && items[i - 1].partial < 0) good = good && cost <= cost_before + cost_before / 8 + 64;
    } else if (i > 0) {
      good = good && items[i - 1].head < item.head;
    }
    cost_before = cost;
  }
  for (int i = 0; good && i < counts.splits; ++i) {
    for (int slot = splits[i].begin; slot < splits[i].begin + splits[i].count; ++slot) good = good && slots[slot] == 1;
    for (size_t at = 0; at < work.places.size(); ++at)
      if (work.places[at].token == splits[i].token && work.places[at].head == splits[i].head) ++written[at];
  }
  for (size_t at = 0; good && at < work.places.size(); ++at) {
    const BackwardItem& place = work.places[at];
    int total = 0;
    for (int head = place.head * heads_per_kv; head < (place.head + 1) * heads_per_kv; ++head)
      total += place.dense ? place.subtiles / 2 - place.position / (2 * work.tiling.tokens)
                           : w.columns.offsets[head * work.columns + place.column + 1] -
                                 w.columns.offsets[head * work.columns + place.column];
    std::sort(parts[at].begin(), parts[at].end());
    int covered = 0;
    for (const auto& [begin, count] : parts[at]) {
      good = good && begin == covered;
      covered += count;
    }
    good = good && covered == total && written[at] == 1;
  }
  if (!good) {
    std::printf(" ORDER OF THE BACKWARD'S WORK WRONG");
    ++failures;
  }
}

void poison_gradients(Tensors& t, DeviceWork& w) {
  for (auto* out : {&t.dq, &t.dk, &t.dv}) out->poison();
  w.dq_sum.poison();
  w.partials.poison();
  w.statistics.poison();
}

template <typename T>
void check_backward(const Case& c, const std::vector<T>& dq, const std::vector<T>& dk, const std::vector<T>& dv,
                    const Reference& want, double relative, double largest) {
  expect(c, "dq", compare(dq, want.dq), relative, largest);
  expect(c, "dk", compare(dk, want.dk), relative, largest);
  expect(c, "dv", compare(dv, want.dv), relative, largest);
}

// Runs a backward that claims to be deterministic, four times; twice on a software device.
void check_deterministic(const Case& c, Tensors& t, DeviceWork& w, const Reference& want,
                         const std::function<void()>& backward) {
  poison_gradients(t, w);
  backward();
  must(cudaDeviceSynchronize(), "deterministic backward");
  const auto dq = t.dq.host(), dk = t.dk.host(), dv = t.dv.host();
  check_backward(c, dq, dk, dv, want, 6e-3, 0.15);
  for (int i = 0; i < (small ? 1 : 3); ++i) {
    backward();
    must(cudaDeviceSynchronize(), "deterministic backward");
    if (!same_bits(dq, t.dq.host()) || !same_bits(dk, t.dk.host()) || !same_bits(dv, t.dv.host())) {
      std::printf(" NOT BIT-EQUAL");
      ++failures;
      break;
    }
  }
}

void check_forward(const Case& c, Tensors& t, const Reference& want, const std::function<void()>& forward) {
  t.o.poison();
  t.lse.poison();
  forward();
  must(cudaDeviceSynchronize(), "forward");
  expect(c, "o", compare(t.o.host(), want.o), 4e-3, 0.1);
  expect(c, "lse", compare(t.lse.host(), want.lse), 1e-5, 1e-3);
}

DeviceArray<float> as_floats(const DeviceArray<__nv_bfloat16>& x) {
  std::vector<float> out;
  for (const __nv_bfloat16 v : x.host()) out.push_back(__bfloat162float(v));
  return DeviceArray<float>(out);
}

void check_fp32(const Case& c, const Shape& shape, const Tensors& t, DeviceWork& w, const Reference& want) {
  const DeviceArray<float> q = as_floats(t.q), k = as_floats(t.k), v = as_floats(t.v), d_o = as_floats(t.d_o);
  DeviceArray<float> o(q.size()), lse(t.lse.size()), dq(q.size()), dk(k.size()), dv(k.size());
  for (auto* out : {&o, &lse, &dq, &dk, &dv}) out->poison();
  ForwardParams f = forward_params(shape, t, w);
  f.q = q.get();
  f.k = k.get();
  f.v = v.get();
  f.o = o.get();
  f.lse = lse.get();
  portable_forward(f, Precision::fp32, nullptr);
  BackwardParams b = backward_params(shape, t, w);
  b.q = q.get();
  b.k = k.get();
  b.v = v.get();
  b.o = o.get();
  b.lse = lse.get();
  b.d_o = d_o.get();
  b.dq = dq.get();
  b.dk = dk.get();
  b.dv = dv.get();
  w.statistics.poison();
  w.partials.poison();
  portable_backward(b, Precision::fp32, nullptr);
  must(cudaDeviceSynchronize(), "fp32");
  std::printf("\n%-36s fp32", "");
  expect(c, "o", compare(o.host(), want.o), 2e-6, 1e-4);
  expect(c, "lse", compare(lse.host(), want.lse), 1e-6, 1e-4);
  check_backward(c, dq.host(), dk.host(), dv.host(), want, 4e-6, 1e-3);
}

bool portable = true;  // those kernels too
std::string filter;    // only the cases whose name holds it
int cases_run = 0;

void run(const Case& c) {
  if (c.name.find(filter) == std::string::npos) return;
  ++cases_run;
  Shape shape;
  std::vector<int32_t> cu{0};
  for (int length : c.lengths) cu.push_back(cu.back() + tokens_of(length));
  shape.tokens = cu.back();
  shape.query_heads = c.query_heads;
  shape.kv_heads = c.kv_heads;
  shape.head_dim = c.d;
  shape.scale = 1.f / std::sqrt(float(c.d));
  std::vector<bool> dense = c.dense;
  if (dense.empty()) dense.assign(c.lengths.size(), true);
  const bool any_sparse = std::count(dense.begin(), dense.end(), false) > 0;
  RowLists lists;
  if (any_sparse) lists = random_lists(cu, c.lists);
  static uint32_t seed = 1;
  Tensors t(shape, seed += 10);
  DeviceWork w(shape, cu, dense, any_sparse ? &lists : nullptr, 132);
  const Reference want = reference(shape, t, cu, dense, any_sparse ? &lists : nullptr);

  std::printf("%-34s splits %d", c.name.c_str(), w.split_count());
  check_order(c, shape, w);
  const ForwardParams f = forward_params(shape, t, w);
  const BackwardParams p = backward_params(shape, t, w);
  if (c.hopper) {
    check_forward(c, t, want, [&] { hopper_forward(f, nullptr); });
    poison_gradients(t, w);
    hopper_backward(p, nullptr);
    must(cudaDeviceSynchronize(), "backward");
    check_backward(c, t.dq.host(), t.dk.host(), t.dv.host(), want, 6e-3, 0.15);
    std::printf(" | deterministic");
    check_deterministic(c, t, w, want, [&] { hopper_backward_deterministic(p, nullptr); });
    if (portable) std::printf("\n%-36s", "");
  }
  if (portable) {
    std::printf(" portable");
    check_forward(c, t, want, [&] { portable_forward(f, Precision::bf16, nullptr); });
    check_deterministic(c, t, w, want, [&] { portable_backward(p, Precision::bf16, nullptr); });
    check_fp32(c, shape, t, w, want);
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Scores so far apart that a row's base must be raised on the way, again and again.
void check_large_scores(int d) {
  const int tokens = tokens_of(900);
  const Shape shape{tokens, 8, 1, d, 25.f / std::sqrt(float(d))};
  const std::vector<int32_t> cu{0, tokens};
  ListOptions options;
  options.heads = 1;
  options.keep = 0.5;
  options.staircase = true;
  const RowLists lists = random_lists(cu, options);
  Tensors t(shape, 17);
  DeviceWork w(shape, cu, {false}, &lists, 132);
  const Reference want = reference(shape, t, cu, {false}, &lists);
  const Case c{"large scores d" + std::to_string(d), 8, 1, d, {tokens}};
  std::printf("%-34s", c.name.c_str());
  const ForwardParams f = forward_params(shape, t, w);
  check_forward(c, t, want, [&] { hopper_forward(f, nullptr); });
  std::printf(" portable");
  check_forward(c, t, want, [&] { portable_forward(f, Precision::bf16, nullptr); });
  std::printf("\n");
}

// On rows that see little but a few keys (scores `peak` times as large) errors are those of FlashAttention's arithmetic
// on the same operands, or smaller. What is left to chance: how the outputs are rounded, of which dQ and dK have dO·O.
// `below_zero`: all scores, and only the forward.
void check_peaked(const std::string& name, float peak, int d, const std::vector<int>& lengths,
                  const ListOptions* options, bool below_zero = false) {
  const Case c{name + " d" + std::to_string(d), 4, 1, d, lengths};
  if (c.name.find(filter) == std::string::npos) return;
  ++cases_run;
  std::vector<int32_t> cu{0};
  for (int length : lengths) cu.push_back(cu.back() + tokens_of(length));
  const Shape shape{cu.back(), 4, 1, d, peak / std::sqrt(float(d))};
  const std::vector<bool> dense(lengths.size(), options == nullptr);
  const RowLists lists = options ? random_lists(cu, *options) : RowLists{};
  Tensors t(shape, 23);
  if (below_zero) {
    const auto set_first = [&](DeviceArray<__nv_bfloat16>& x, float value) {
      std::vector<__nv_bfloat16> host = x.host();
      for (size_t i = 0; i < host.size(); i += d) host[i] = __float2bfloat16(value);
      x = DeviceArray<__nv_bfloat16>(host);
    };
    set_first(t.q, 10);
    set_first(t.k, -10);
  }
  DeviceWork w(shape, cu, dense, options ? &lists : nullptr, 132);
  const Reference want = reference(shape, t, cu, dense, options ? &lists : nullptr, true);
  const FlashModel model = flash_model(shape, t, cu, want);
  std::printf("%-34s", c.name.c_str());
  ForwardParams f = forward_params(shape, t, w);
  f.tiling.keys = kBlock;  // of the backward, for which the lists' own are not what the Hopper kernels take
  t.o.poison();
  hopper_forward(f, nullptr);
  must(cudaDeviceSynchronize(), "forward");
  const auto no_worse = [&](const char* what, const auto& got, const auto& modelled, const auto& exact, double chance) {
    const double error = compare(got, exact).relative, limit = compare(modelled, exact).relative;
    const bool good = error <= chance * limit;
    std::printf(" %s %.3e (FlashAttention %.3e)%s", what, error, limit, good ? "" : " FAILED");
    if (!good) ++failures;
  };
  no_worse("o", t.o.host(), model.o, want.o, 1.005);
  if (below_zero) expect(c, "lse", compare(t.lse.host(), want.lse), 1e-5, 1e-3);
  if (w.work.tiling.block == kBlock && !below_zero) {
    hopper_backward(backward_params(shape, t, w), nullptr);
    must(cudaDeviceSynchronize(), "backward");
    no_worse("dq", t.dq.host(), model.dq, want.dq, 1.03);
    no_worse("dk", t.dk.host(), model.dk, want.dk, 1.03);
    no_worse("dv", t.dv.host(), model.dv, want.dv, 1.03);
  }
  std::printf("\n");
}

void check_peaked() {
  ListOptions blocks, halves;
  blocks.heads = halves.heads = 1;
  blocks.keep = halves.keep = 0.5;
  blocks.staircase = true;
  halves.block = 64;
  for (const int d : {64, 128}) {
    check_peaked("peaked 1 dense", 1, d, {700, 300}, nullptr);
    check_peaked("peaked 2 dense", 2, d, {700}, nullptr);
    check_peaked("peaked 4 dense", 4, d, {700}, nullptr);
    check_peaked("peaked 16 dense", 16, d, {700}, nullptr);
    check_peaked("peaked 4 staircase", 4, d, {700, 129}, &blocks);
    check_peaked("peaked 4 blocks of 64", 4, d, {700}, &halves);
    check_peaked("peaked 2 dense below zero", 2, d, {700, 65}, nullptr, true);
    check_peaked("peaked 2 staircase below zero", 2, d, {700, 129}, &blocks, true);
    check_peaked("peaked 2 blocks of 64 below zero", 2, d, {700}, &halves, true);
  }
}

// Forward and deterministic backward captured into a graph give what direct calls gave, replay after replay.
void check_graph(int replays) {
  const std::vector<int32_t> cu{0, tokens_of(1100), tokens_of(1100) + tokens_of(400)};
  const Shape shape{cu.back(), 16, 2, 128, 0.088f};
  ListOptions options;
  options.heads = 2;
  options.keep = 0.3;
  options.staircase = true;
  options.sinks = 1;
  const RowLists lists = random_lists(cu, options);
  Tensors t(shape, 7);
  DeviceWork w(shape, cu, {false, true}, &lists, 16);
  const ForwardParams f = forward_params(shape, t, w);
  const BackwardParams b = backward_params(shape, t, w);
  hopper_forward(f, nullptr);
  hopper_backward_deterministic(b, nullptr);
  must(cudaDeviceSynchronize(), "direct");
  const auto o = t.o.host(), dq = t.dq.host(), dk = t.dk.host(), dv = t.dv.host();

  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  w.order(shape, stream);
  hopper_forward(f, stream);
  hopper_backward(b, stream);
  hopper_backward_deterministic(b, stream);
  cudaGraph_t graph;
  must(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t executable;
  must(cudaGraphInstantiate(&executable, graph, 0), "graph");
  bool same = true;
  for (int i = 0; i < replays && same; ++i) {
    if (i % 100 == 0)
      for (auto* out : {&t.o, &t.dq, &t.dk, &t.dv}) out->poison();
    must(cudaGraphLaunch(executable, stream), "graph");
    must(cudaStreamSynchronize(stream), "graph");
    same = same_bits(o, t.o.host()) && same_bits(dq, t.dq.host()) && same_bits(dk, t.dk.host()) &&
           same_bits(dv, t.dv.host());
  }
  std::printf("graph of order, forward and backwards, %d replays, splits %d: %s\n", replays, w.split_count(),
              same ? "bit-equal" : "FAILED");
  if (!same) ++failures;
  must(cudaGraphExecDestroy(executable), "graph");
  must(cudaGraphDestroy(graph), "graph");
  must(cudaStreamDestroy(stream), "stream");
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (int d : {128, 64}) {
    const std::string s = " d" + std::to_string(d);
    out.push_back({"dense 8:1 128" + s, 8, 1, d, {128}, {}});
    out.push_back({"dense 8:1 1000" + s, 8, 1, d, {1000}, {}});
    out.push_back({"dense 16:2 1..777" + s, 16, 2, d, {1, 17, 128, 777, 129, 2, 640}, {}});
    out.push_back({"dense 7:1 18-token tiles" + s, 7, 1, d, {700, 333}, {}});
    out.push_back({"dense 4:4" + s, 4, 4, d, {513, 100}, {}});
    out.push_back({"dense 64:1" + s, 64, 1, d, {300}, {}});
    ListOptions lists;
    lists.heads = 2;
    lists.keep = 0.4;
    out.push_back({"sparse 16:2 qb16" + s, 16, 2, d, {1536}, {false}, lists});
    out.push_back({"sparse 14:2 qb16" + s, 14, 2, d, {1200, 35}, {false, false}, lists});
    lists.staircase = true;
    out.push_back({"staircase 16:2 qb16" + s, 16, 2, d, {1111, 513}, {false, false}, lists});
    out.push_back({"staircase 14:2 mixed dense" + s, 14, 2, d, {700, 300, 555, 1}, {false, true, false, false}, lists});
    lists.query_block = 64;
    out.push_back({"staircase 16:2 qb64" + s, 16, 2, d, {1100}, {false}, lists});
    lists.query_block = 128;
    lists.diagonal = false;
    lists.keep = 0.2;
    out.push_back({"empty rows 16:2 qb128" + s, 16, 2, d, {1300, 90, 400}, {false, false, true}, lists});
    lists.heads = 8;
    out.push_back({"per query head 8:2 qb128" + s, 8, 2, d, {1025, 64}, {false, false}, lists});
    lists.query_block = 32;
    lists.diagonal = true;
    out.push_back({"per query head 8:2 qb32" + s, 8, 2, d, {600, 200}, {false, true}, lists});
    lists.query_block = 16;
    lists.heads = 1;
    lists.sinks = 1;
    lists.local = 1;
    out.push_back({"hub columns 8:1 qb16" + s, 8, 1, d, {3000}, {false}, lists});
  }
  // What only the portable kernels take.
  for (int d : {16, 32, 96}) {
    const std::string s = " d" + std::to_string(d);
    ListOptions lists;
    lists.heads = 2;
    lists.keep = 0.4;
    lists.staircase = true;
    out.push_back({"dense 4:2" + s, 4, 2, d, {300, 1, 77}, {}, {}, false});
    out.push_back({"staircase 14:2 mixed dense" + s, 14, 2, d, {700, 300}, {false, true}, lists, false});
  }
  for (int group : {1, 2, 7, 8}) {
    ListOptions lists;
    lists.heads = 2;
    lists.block = 64;
    lists.keep = 0.3;
    lists.staircase = true;
    lists.sinks = 1;
    const std::string s = " of " + std::to_string(group);
    out.push_back({"blocks of 64, group" + s, 2 * group, 2, 64, {1100, 65, 1}, {false, false, true}, lists, false});
    lists.block = kBlock;
    lists.sinks = 0;
    lists.diagonal = false;
    lists.keep = 0.1;
    out.push_back({"empty rows and columns, group" + s, 2 * group, 2, 128, {1300, 130}, {false, false}, lists});
  }
  return out;
}

}  // namespace
}  // namespace sb::gpu

// --short leaves out the repetitions, for the memory checker, --hopper the portable kernels too, for the slower one of
// races; a second argument keeps only the cases whose name holds it.
int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  sb::gpu::small = sb::test::smaller_on_software_device(
      "sequences of a third of the tokens, 2 deterministic runs for 4, 2 replays of the graph for 1000");
  const bool full = argc < 2;
  sb::gpu::portable = full || std::string(argv[1]) != "--hopper";
  std::printf("relative / largest errors against fp64\n");
  if (argc > 2) sb::gpu::filter = argv[2];
  for (const auto& c : sb::gpu::cases()) sb::gpu::run(c);
  sb::gpu::check_peaked();
  if (argc < 3) {
    for (const int d : {64, 128}) sb::gpu::check_large_scores(d);
    sb::gpu::check_graph(full && !sb::gpu::small ? 1000 : 2);
  }
  if (sb::gpu::cases_run == 0) {
    std::printf("no case has %s in its name\n", argv[2]);
    ++sb::gpu::failures;
  }
  std::printf(sb::gpu::failures ? "%d FAILED\n" : "all passed\n", sb::gpu::failures);
  return sb::gpu::failures ? 1 : 0;
}
