// Checks the Hopper kernels against fp64 on a machine with an SM90 GPU. Exit status 0: all passed.

#include <algorithm>
#include <cstring>
#include <string>

#include "tests/attention/hopper/reference.h"

namespace sb::hopper {
namespace {

struct Case {
  std::string name;
  int query_heads, kv_heads, d;
  std::vector<int> lengths;
  std::vector<bool> dense;  // empty: all dense
  ListOptions lists{};
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

void expect(const Case& c, const char* what, ErrorOf error, double relative, double largest) {
  const bool good = error.relative <= relative && error.largest <= largest;
  std::printf(" %s %.1e/%.1e%s", what, error.relative, error.largest, good ? "" : " FAILED");
  if (!good) ++failures;
  (void)c;
}

void check_backward(const Case& c, const Tensors& t, const Reference& want) {
  expect(c, "dq", compare(t.dq.host(), want.dq), 6e-3, 0.15);
  expect(c, "dk", compare(t.dk.host(), want.dk), 6e-3, 0.15);
  expect(c, "dv", compare(t.dv.host(), want.dv), 6e-3, 0.15);
}

void run(const Case& c) {
  Shape shape;
  std::vector<int32_t> cu{0};
  for (int length : c.lengths) cu.push_back(cu.back() + length);
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

  std::printf("%-34s splits %zu", c.name.c_str(), w.work.splits.size());
  t.o.poison();
  t.lse.poison();
  forward(forward_params(shape, t, w), nullptr);
  must(cudaDeviceSynchronize(), "forward");
  expect(c, "o", compare(t.o.host(), want.o), 4e-3, 0.1);
  expect(c, "lse", compare(t.lse.host(), want.lse), 1e-5, 1e-3);

  t.dq.poison();
  t.dk.poison();
  t.dv.poison();
  w.dq_sum.poison();
  w.partials.poison();
  w.statistics.poison();
  const BackwardParams p = backward_params(shape, t, w);
  backward(p, nullptr);
  must(cudaDeviceSynchronize(), "backward");
  check_backward(c, t, want);
  t.dq.poison();
  t.dk.poison();
  t.dv.poison();
  w.partials.poison();
  backward_deterministic(p, nullptr);
  must(cudaDeviceSynchronize(), "deterministic backward");
  std::printf(" | deterministic");
  check_backward(c, t, want);
  const auto dq = t.dq.host(), dk = t.dk.host(), dv = t.dv.host();
  for (int i = 0; i < 3; ++i) {
    backward_deterministic(p, nullptr);
    must(cudaDeviceSynchronize(), "deterministic backward");
    if (!same_bits(dq, t.dq.host()) || !same_bits(dk, t.dk.host()) || !same_bits(dv, t.dv.host())) {
      std::printf(" NOT BIT-EQUAL");
      ++failures;
      break;
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Forward and deterministic backward captured into a graph give what direct calls gave, replay after replay.
void check_graph(int replays) {
  Shape shape{1500, 16, 2, 128, 0.088f};
  const std::vector<int32_t> cu{0, 1100, 1500};
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
  forward(f, nullptr);
  backward_deterministic(b, nullptr);
  must(cudaDeviceSynchronize(), "direct");
  const auto o = t.o.host(), dq = t.dq.host(), dk = t.dk.host(), dv = t.dv.host();

  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  forward(f, stream);
  backward(b, stream);
  backward_deterministic(b, stream);
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
  std::printf("graph of forward and backwards, %d replays, splits %zu: %s\n", replays, w.work.splits.size(),
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
  return out;
}

}  // namespace
}  // namespace sb::hopper

// --short leaves out the repetitions, for the memory checker; a second argument keeps the cases whose name holds it.
int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  const bool full = argc < 2 || std::string(argv[1]) != "--short";
  std::printf("relative / largest errors against fp64\n");
  for (const auto& c : sb::hopper::cases())
    if (argc < 3 || c.name.find(argv[2]) != std::string::npos) sb::hopper::run(c);
  sb::hopper::check_graph(full ? 1000 : 2);
  std::printf(sb::hopper::failures ? "%d FAILED\n" : "all passed\n", sb::hopper::failures);
  return sb::hopper::failures ? 1 : 0;
}
