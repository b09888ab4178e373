// Times the Hopper attention kernels. Useful FLOPs: 4·d for every selected (query, key) pair and head forward, 2.5
// times that backward. Lists are drawn at random; bench/peers/attention_lists.py draws the same ones for FlexAttention.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <thread>

#include "attention/hopper/prepare.cuh"
#include "tests/attention/hopper/select_case.h"

namespace sb::gpu {
void hopper_forward_before(const ForwardParams& params, void* stream);
void hopper_forward_no_turns(const ForwardParams& params, void* stream);
namespace {

// What the card does, from the driver's own library where there is one.
class Card {
 public:
  Card() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library_, "nvmlInit_v2"));
    const auto handle = reinterpret_cast<int (*)(unsigned, void**)>(dlsym(library_, "nvmlDeviceGetHandleByIndex_v2"));
    clock_ = reinterpret_cast<int (*)(void*, int, unsigned*)>(dlsym(library_, "nvmlDeviceGetClockInfo"));
    power_ = reinterpret_cast<int (*)(void*, unsigned*)>(dlsym(library_, "nvmlDeviceGetPowerUsage"));
    if (!init || !handle || !clock_ || !power_ || init() != 0 || handle(0, &device_) != 0) device_ = nullptr;
  }
  unsigned megahertz() const {
    unsigned value = 0;
    if (device_ != nullptr) clock_(device_, 1, &value);
    return value;
  }
  unsigned watts() const {
    unsigned value = 0;
    if (device_ != nullptr) power_(device_, &value);
    return value / 1000;
  }

 private:
  void *library_ = nullptr, *device_ = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
};

const Card& card() {
  static const Card one;
  return one;
}

// The card runs at its power limit and remembers for a while what it did before: every case starts from rest.
int pause_ms = 250;
void rest() {
  must(cudaDeviceSynchronize(), "rest");
  std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
}

double median_ms(const std::function<void()>& body, int repeats) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  for (int i = 0; i < 3; ++i) body();
  std::vector<float> times(repeats);
  for (float& time : times) {
    must(cudaEventRecord(begin), "record");
    body();
    must(cudaEventRecord(end), "record");
    must(cudaEventSynchronize(end), "kernel");
    must(cudaEventElapsedTime(&time, begin, end), "time");
  }
  std::sort(times.begin(), times.end());
  return times[repeats / 2];
}

// Pairs (query, key) that are computed usefully, for one query head of each list head.
double useful_pairs(const std::vector<int32_t>& cu, const RowLists* lists, int list_heads) {
  double pairs = 0;
  if (lists == nullptr) {
    for (size_t s = 0; s + 1 < cu.size(); ++s) {
      const double n = cu[s + 1] - cu[s];
      pairs += n * (n + 1) / 2 * list_heads;
    }
    return pairs;
  }
  const int length = cu[1];  // the sparse cases have one sequence
  for (int head = 0; head < list_heads; ++head)
    for (int row = 0; row < lists->rows; ++row)
      for (int32_t i = lists->offsets[head * lists->rows + row]; i < lists->offsets[head * lists->rows + row + 1];
           ++i) {
        const int key = entry_id(lists->entries[i]) * kBlock;
        const int begin = row * lists->query_block + entry_first(lists->entries[i]);
        const int end = std::min((row + 1) * lists->query_block, length);
        if (begin >= key + kBlock - 1) {
          pairs += double(end - begin) * kBlock;
        } else {
          for (int t = begin; t < end; ++t) pairs += std::clamp(t - key + 1, 0, kBlock);
        }
      }
  return pairs;
}

void variants(const char* name, int query_heads, int kv_heads, int d, int length, double keep, int query_block) {
  const Shape shape{length, query_heads, kv_heads, d, 1.f / std::sqrt(float(d))};
  const std::vector<int32_t> cu{0, length};
  ListOptions options;
  options.heads = kv_heads;
  options.keep = keep;
  options.query_block = query_block;
  const RowLists lists = keep < 1 ? random_lists(cu, options) : RowLists{};
  Tensors t(shape, 42);
  DeviceWork w(shape, cu, {keep >= 1}, keep < 1 ? &lists : nullptr, 132);
  const double flops = 4.0 * d * useful_pairs(cu, keep < 1 ? &lists : nullptr, kv_heads) * (query_heads / kv_heads);
  const ForwardParams f = forward_params(shape, t, w);
  const struct {
    const char* name;
    void (*forward)(const ForwardParams&, void*);
  } all[] = {{"before", hopper_forward_before}, {"now", hopper_forward}, {"no turns", hopper_forward_no_turns}};
  for (int round = 0; round < 3; ++round) {
    std::printf("%-26s", name);
    for (const auto& one : all) {
      rest();
      const double ms = median_ms([&] { one.forward(f, nullptr); }, flops > 2e12 ? 11 : 41);
      std::printf(" | %s %.3f ms %.0f (%u MHz)", one.name, ms, flops / ms / 1e9, card().megahertz());
    }
    std::printf("\n");
  }
}

std::string filter;  // only the cases whose name holds it

void run(const std::string& name, int query_heads, int kv_heads, int d, const std::vector<int>& lengths, double keep,
         int query_block, bool staircase, bool deterministic, int sinks = 0, int local = 0) {
  if (name.find(filter) == std::string::npos) return;
  Shape shape;
  std::vector<int32_t> cu{0};
  for (int length : lengths) cu.push_back(cu.back() + length);
  shape.tokens = cu.back();
  shape.query_heads = query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = d;
  shape.scale = 1.f / std::sqrt(float(d));
  RowLists lists;
  const bool sparse = keep < 1;
  if (sparse) {
    ListOptions options;
    options.query_block = query_block;
    options.heads = kv_heads;
    options.keep = keep;
    options.staircase = staircase;
    options.sinks = sinks;
    options.local = local;
    lists = random_lists(cu, options);
  }
  Tensors t(shape, 42);
  DeviceWork w(shape, cu, std::vector<bool>(lengths.size(), !sparse), sparse ? &lists : nullptr, 132);
  const double flops = 4.0 * d * useful_pairs(cu, sparse ? &lists : nullptr, kv_heads) * (query_heads / kv_heads);
  const ForwardParams f = forward_params(shape, t, w);
  const BackwardParams b = backward_params(shape, t, w);
  const int repeats = flops > 2e13 ? 5 : flops > 2e12 ? 11 : 41;
  rest();
  const double forward_ms = median_ms([&] { hopper_forward(f, nullptr); }, repeats);
  const unsigned forward_clock = card().megahertz();
  const double prepare_ms = median_ms([&] { prepare_rows(b, true, nullptr); }, repeats);
  const double finish_ms = median_ms([&] { finish_dq(b, nullptr), finish_split_columns(b, nullptr); }, repeats);
  rest();
  const double backward_ms = median_ms([&] { hopper_backward(b, nullptr); }, repeats);
  const unsigned backward_clock = card().megahertz(), watts = card().watts();
  double deterministic_ms = 0;
  if (deterministic) rest();
  if (deterministic) deterministic_ms = median_ms([&] { hopper_backward_deterministic(b, nullptr); }, repeats);
  std::printf("%-30s %8.3f %6.0f | %8.3f %6.0f (rows %.3f, finish %.3f, splits %d)", name.c_str(), forward_ms,
              flops / forward_ms / 1e9, backward_ms, 2.5 * flops / backward_ms / 1e9, prepare_ms, finish_ms,
              w.split_count());
  if (deterministic) std::printf(" | %8.3f %6.0f", deterministic_ms, 2.5 * flops / deterministic_ms / 1e9);
  std::printf(" | %u, %u MHz, %u W\n", forward_clock, backward_clock, watts);
  std::fflush(stdout);
}

// Selection with its lists against the attention it selects for.
void run_selection(const std::string& name, int query_heads, int kv_heads, int d, int length, double keep) {
  if (name.find(filter) == std::string::npos) return;
  const Shape shape{length, query_heads, kv_heads, d, 1.f / std::sqrt(float(d))};
  const std::vector<int32_t> cu{0, length};
  SelectionConfig config;
  config.budget = static_cast<int64_t>(keep * length / 2);
  const SequenceTiles tiles{length, kBlock, 16, 1, 2, config.budget};
  Tensors t(shape, 42);
  SelectCase chosen(shape, cu, {false}, {tiles}, config, true);
  rest();
  const double select_ms = median_ms([&] { chosen.run(shape, t.q.get(), t.k.get()); }, 11);
  const RowLists lists = chosen.lists(shape);
  DeviceWork w(shape, cu, {false}, &lists, 132);
  const ForwardParams f = forward_params(shape, t, w);
  const BackwardParams b = backward_params(shape, t, w);
  const double order_ms = median_ms([&] { w.order(shape, nullptr); }, 11);
  const double forward_ms = median_ms([&] { hopper_forward(f, nullptr); }, 11);
  const double backward_ms = median_ms([&] { hopper_backward(b, nullptr); }, 11);
  std::printf("%-30s selection %.3f ms, order %.3f, forward %.3f, backward %.3f: %.1f %%\n", name.c_str(), select_ms,
              order_ms, forward_ms, backward_ms, 100 * (select_ms + order_ms) / (forward_ms + backward_ms));
}

// The portable kernels on the same lists.
void run_portable(const std::string& name, int query_heads, int kv_heads, int d, int length, double keep) {
  if (name.find(filter) == std::string::npos) return;
  const Shape shape{length, query_heads, kv_heads, d, 1.f / std::sqrt(float(d))};
  const std::vector<int32_t> cu{0, length};
  ListOptions options;
  options.heads = kv_heads;
  options.keep = keep;
  const RowLists lists = keep < 1 ? random_lists(cu, options) : RowLists{};
  Tensors t(shape, 42);
  DeviceWork w(shape, cu, {keep >= 1}, keep < 1 ? &lists : nullptr, 132);
  const double flops = 4.0 * d * useful_pairs(cu, keep < 1 ? &lists : nullptr, kv_heads) * (query_heads / kv_heads);
  const double forward_ms =
      median_ms([&] { portable_forward(forward_params(shape, t, w), Precision::bf16, nullptr); }, 5);
  const double backward_ms =
      median_ms([&] { portable_backward(backward_params(shape, t, w), Precision::bf16, nullptr); }, 5);
  std::printf("%-30s %8.3f %6.0f | %8.3f %6.0f\n", name.c_str(), forward_ms, flops / forward_ms / 1e9, backward_ms,
              2.5 * flops / backward_ms / 1e9);
}

}  // namespace
}  // namespace sb::gpu

int main(int argc, char** argv) {
  using sb::gpu::run;
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  const std::string mode = argc > 1 ? argv[1] : "all";
  if (argc > 2) sb::gpu::filter = argv[2];
  if (mode == "variants") {
    sb::gpu::variants("10% 14:2 d64 32K qb16", 14, 2, 64, 32768, 0.1, 16);
    sb::gpu::variants("dense 14:2 d64 32K", 14, 2, 64, 32768, 1, 0);
    sb::gpu::variants("10% 16:2 d128 32K qb16", 16, 2, 128, 32768, 0.1, 16);
    sb::gpu::variants("dense 16:2 d128 32K", 16, 2, 128, 32768, 1, 0);
    sb::gpu::variants("10% 16:2 d128 128K qb16", 16, 2, 128, 131072, 0.1, 16);
    return 0;
  }
  if (argc > 3) sb::gpu::pause_ms = std::atoi(argv[3]);
  const bool det = mode != "quick";
  const bool all = mode == "all";
  std::printf("%-30s %8s %6s | %8s %6s\n", "case (causal, block 128)", "fwd ms", "TF/s", "bwd ms", "TF/s");
  run("dense 16:2 d128 32K", 16, 2, 128, {32768}, 1, 0, false, det);
  run("10% 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.1, 16, false, det);
  run("10% stairs 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.1, 16, true, det);
  run("10% 16:2 d128 32K qb128", 16, 2, 128, {32768}, 0.1, 128, false, det);
  run("10% 16:2 d128 128K qb16", 16, 2, 128, {131072}, 0.1, 16, false, false);
  run("dense 14:2 d64 32K", 14, 2, 64, {32768}, 1, 0, false, det);
  run("10% 14:2 d64 32K qb16", 14, 2, 64, {32768}, 0.1, 16, false, det);
  sb::gpu::run_selection("topk 10% 16:2 d128 32K", 16, 2, 128, 32768, 0.1);
  sb::gpu::run_selection("topk 10% 16:2 d128 128K", 16, 2, 128, 131072, 0.1);
  sb::gpu::run_selection("topk 10% 14:2 d64 32K", 14, 2, 64, 32768, 0.1);
  sb::gpu::run_portable("portable dense 16:2 d128 16K", 16, 2, 128, 16384, 1);
  sb::gpu::run_portable("portable 10% 16:2 d128 32K", 16, 2, 128, 32768, 0.1);
  if (!all) return 0;
  run("dense 16:2 d128 8K", 16, 2, 128, {8192}, 1, 0, false, det);
  run("dense 16:2 d128 4x8K packed", 16, 2, 128, {8192, 8192, 8192, 8192}, 1, 0, false, det);
  run("dense 32:8 d128 16K", 32, 8, 128, {16384}, 1, 0, false, det);
  run("20% 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.2, 16, false, det);
  run("5% 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.05, 16, false, det);
  run("10% sink+local 16:2 d128 32K", 16, 2, 128, {32768}, 0.1, 16, false, det, 1, 2);
  run("10% 16:2 d128 64K qb16", 16, 2, 128, {65536}, 0.1, 16, false, det);
  run("10% 16:2 d128 64K qb128", 16, 2, 128, {65536}, 0.1, 128, false, det);
  run("5% 16:2 d128 128K qb16", 16, 2, 128, {131072}, 0.05, 16, false, false);
  run("10% 14:2 d64 32K qb128", 14, 2, 64, {32768}, 0.1, 128, false, det);
  run("10% 32:8 d128 32K qb32", 32, 8, 128, {32768}, 0.1, 32, false, det);
  return 0;
}
