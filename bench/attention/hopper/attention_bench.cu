// Times the Hopper attention kernels. Useful FLOPs: 4·d for every selected (query, key) pair and head forward, 2.5
// times that backward. Lists are drawn at random (bench/peers/attention_lists.py draws the same ones for FlexAttention)
// or read from bench/attention/trained_lists_32k.bin, which dump_lists wrote. From the repository root:
//   attention_hopper_bench [quick|all] [part of a case's name] [milliseconds of rest before a measurement]
//   attention_hopper_bench files DIRECTORY query_heads kv_heads d tokens

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <thread>

#include "attention/gpu/hopper/prepare.cuh"
#include "tests/attention/gpu/hopper/select_case.h"

namespace sb::gpu {
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

// The card runs at its power limit and remembers for a while what it did before: every case starts from rest, four
// times as long where kernels take long.
int pause_ms = 250;
void rest(bool longer = false) {
  must(cudaDeviceSynchronize(), "rest");
  std::this_thread::sleep_for(std::chrono::milliseconds(longer ? 4 * pause_ms : pause_ms));
}

// Of each of so many calls. They are queued without waiting, so that the host's work is in none of them.
std::vector<double> call_times_ms(const std::function<void()>& body, int calls) {
  std::vector<cudaEvent_t> borders(calls + 1);
  for (cudaEvent_t& border : borders) must(cudaEventCreate(&border), "event");
  must(cudaEventRecord(borders[0]), "record");
  for (int i = 0; i < calls; ++i) {
    body();
    must(cudaEventRecord(borders[i + 1]), "record");
  }
  must(cudaEventSynchronize(borders[calls]), "kernel");
  std::vector<double> times(calls);
  for (int i = 0; i < calls; ++i) {
    float time = 0;
    must(cudaEventElapsedTime(&time, borders[i], borders[i + 1]), "time");
    times[i] = time;
  }
  for (const cudaEvent_t border : borders) must(cudaEventDestroy(border), "event");
  return times;
}

double median_ms(const std::function<void()>& body, int repeats) {
  for (int i = 0; i < 3; ++i) body();
  std::vector<double> times = call_times_ms(body, repeats);
  std::sort(times.begin(), times.end());
  return times[repeats / 2];
}

// At the power limit, which takes up to a tenth of a second to act: the last 0.5 of 0.7 s of calls after a rest, of
// which one takes about `once` ms. (Nine tenths of a second after a rest the card slows down by a tenth for a while,
// whatever runs.)
double lasting_ms(const std::function<void()>& body, double once) {
  rest();
  const std::vector<double> times = call_times_ms(body, std::max(3, static_cast<int>(700 / once)));
  double before = 0;
  auto first = times.begin();
  while (before < 200 && first + 1 != times.end()) before += *first++;
  return std::accumulate(first, times.end(), 0.0) / static_cast<double>(times.end() - first);
}

// The cases that bench/peers/attention_lists.py has too; the others are not timed in a row.
bool peers_have(const std::string& name) {
  return name.find("qb128") != std::string::npos || name == "dense 16:2 d128 32K" || name == "dense 14:2 d64 32K";
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

std::string filter;  // only the cases whose name holds it

// Which backward the trainer takes.
bool taken_in_two(const Shape& shape, const DeviceWork& w, const std::vector<int32_t>& cu, const RowLists* lists) {
  const int64_t entries = lists ? static_cast<int64_t>(lists->entries.size()) : 0;
  const auto causal = static_cast<int64_t>(useful_pairs(cu, nullptr, shape.kv_heads));
  return quicker_in_two_kernels(shape, w.work.tiling,
                                {.entries = entries, .dense = lists ? 0 : causal, .causal = causal});
}

// `lists` null: dense.
void measure(const std::string& name, const Shape& shape, const std::vector<int32_t>& cu, const RowLists* lists,
             bool deterministic) {
  Tensors t(shape, 42);
  DeviceWork w(shape, cu, std::vector<bool>(cu.size() - 1, lists == nullptr), lists, 132);
  const double flops =
      4.0 * shape.head_dim * useful_pairs(cu, lists, shape.kv_heads) * (shape.query_heads / shape.kv_heads);
  const ForwardParams f = forward_params(shape, t, w);
  const BackwardParams b = backward_params(shape, t, w);
  // As many as the peers': more would last until the power limit acts.
  const int repeats = flops > 2e13 ? 5 : flops > 2e12 ? 11 : 15;
  const bool heavy = flops > 2e12;
  rest(heavy);
  const std::function<void()> forward = [&] { hopper_forward(f, nullptr); };
  const std::function<void()> in_one = [&] { hopper_backward(b, nullptr); };
  const std::function<void()> in_two = [&] { hopper_backward_deterministic(b, nullptr); };
  const double forward_ms = median_ms(forward, repeats);
  const unsigned forward_clock = card().megahertz();
  const double prepare_ms = median_ms([&] { prepare_rows(b, true, nullptr); }, repeats);
  const double finish_ms = median_ms([&] { finish_dq(b, nullptr), finish_split_columns(b, nullptr); }, repeats);
  rest(heavy);
  const double backward_ms = median_ms(in_one, repeats);
  const unsigned backward_clock = card().megahertz(), watts = card().watts();
  std::printf("%-30s %8.3f %6.0f | %8.3f %6.0f (rows %.3f, finish %.3f, splits %d)", name.c_str(), forward_ms,
              flops / forward_ms / 1e9, backward_ms, 2.5 * flops / backward_ms / 1e9, prepare_ms, finish_ms,
              w.split_count());
  if (deterministic) {
    rest(heavy);
    const double ms = median_ms(in_two, repeats);
    const double keys_ms = median_ms([&] { prepare_rows(b, false, nullptr), backward_keys(b, nullptr); }, repeats);
    const bool taken = taken_in_two(shape, w, cu, lists);
    std::printf(" | %8.3f %6.0f%s (row sums and keys %.3f)", ms, 2.5 * flops / ms / 1e9, taken ? " (taken)" : "",
                keys_ms);
    if (peers_have(name)) {
      const double forward_lasting = lasting_ms(forward, forward_ms);
      const double lasting = taken ? lasting_ms(in_two, ms) : lasting_ms(in_one, backward_ms);
      std::printf(" | in a row %.0f / %.0f", flops / forward_lasting / 1e9, 2.5 * flops / lasting / 1e9);
    }
  }
  std::printf(" | %u, %u MHz, %u W\n", forward_clock, backward_clock, watts);
  std::fflush(stdout);
}

void run(const std::string& name, int query_heads, int kv_heads, int d, const std::vector<int>& lengths, double keep,
         int query_block, bool staircase, bool deterministic, int sinks = 0, int local = 0, float peak = 1) {
  if (name.find(filter) == std::string::npos) return;
  std::vector<int32_t> cu{0};
  for (int length : lengths) cu.push_back(cu.back() + length);
  const Shape shape{cu.back(), query_heads, kv_heads, d, peak / std::sqrt(float(d))};
  RowLists lists;
  if (keep < 1) {
    ListOptions options;
    options.query_block = query_block;
    options.heads = kv_heads;
    options.keep = keep;
    options.staircase = staircase;
    options.sinks = sinks;
    options.local = local;
    lists = random_lists(cu, options);
  }
  measure(name, shape, cu, keep < 1 ? &lists : nullptr, deterministic);
}

// Lists from a file of dump_lists.
void run_file(const std::string& name, const std::string& path, int query_heads, int d, bool deterministic) {
  if (name.find(filter) == std::string::npos) return;
  std::ifstream in(path, std::ios::binary);
  int32_t head[5] = {};
  in.read(reinterpret_cast<char*>(head), sizeof(head));
  const auto [heads, query_blocks, key_blocks, query_block, block] = head;
  constexpr int kMost = 1 << 12;
  const bool sound = in && heads > 0 && heads <= query_heads && query_blocks > 0 && query_blocks <= kMost &&
                     key_blocks > 0 && key_blocks <= kMost && query_block > 0 && query_block <= kBlock &&
                     block == kBlock;
  std::vector<uint8_t> bytes(sound ? size_t(heads) * query_blocks * key_blocks : 0);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!sound || !in) {
    std::printf("%-30s %s is not there or no file of dump_lists\n", name.c_str(), path.c_str());
    return;
  }
  RowLists lists{heads, query_block, query_blocks, {0}, {}, kBlock};
  for (size_t row = 0; row < size_t(heads) * query_blocks; ++row) {
    for (int key_block = 0; key_block < key_blocks; ++key_block)
      if (const uint8_t first = bytes[row * key_blocks + key_block]; first != 255)
        lists.entries.push_back(list_entry(key_block, first));
    lists.offsets.push_back(static_cast<int32_t>(lists.entries.size()));
  }
  const std::vector<int32_t> cu{0, query_blocks * query_block};
  measure(name, {cu[1], query_heads, heads, d, 1.f / std::sqrt(float(d))}, cu, &lists, deterministic);
}

// Attention of given operands to files, for the script that compares errors: q, k, v, do in, o, dq, dk, dv out, bf16.
void run_files(const std::string& directory, const Shape& shape) {
  const std::vector<int32_t> cu{0, static_cast<int32_t>(shape.tokens)};
  Tensors t(shape, 1);
  DeviceWork w(shape, cu, {true}, nullptr, 132);
  const auto copy = [&](const char* name, DeviceArray<__nv_bfloat16>& array, bool in) {
    std::vector<__nv_bfloat16> host(array.size());
    const auto bytes = static_cast<std::streamsize>(host.size() * sizeof(host[0]));
    std::fstream file(directory + "/" + name, std::ios::binary | (in ? std::ios::in : std::ios::out));
    if (in) {
      file.read(reinterpret_cast<char*>(host.data()), bytes);
      must(cudaMemcpy(array.get(), host.data(), bytes, cudaMemcpyHostToDevice), "copy to device");
    } else {
      host = array.host();
      file.write(reinterpret_cast<const char*>(host.data()), bytes);
    }
    if (!file) std::printf("%s/%s cannot be %s\n", directory.c_str(), name, in ? "read" : "written");
  };
  copy("q", t.q, true);
  copy("k", t.k, true);
  copy("v", t.v, true);
  copy("do", t.d_o, true);
  hopper_forward(forward_params(shape, t, w), nullptr);
  hopper_backward(backward_params(shape, t, w), nullptr);
  must(cudaDeviceSynchronize(), "attention");
  copy("o", t.o, false);
  copy("dq", t.dq, false);
  copy("dk", t.dk, false);
  copy("dv", t.dv, false);
}

// Selection with its lists against the attention it selects for: one after the other, and what it adds where the column
// lists and the order of the work are made beside the forward, as the trainer does it.
void run_selection(const std::string& name, int query_heads, int kv_heads, int d, int length, double keep,
                   int score_tokens = 0, SelectionPattern pattern = SelectionPattern::topk,
                   SelectionOrder selection_order = SelectionOrder::causal, BlockScore score = BlockScore::moments) {
  if (name.find(filter) == std::string::npos) return;
  const Shape shape{length, query_heads, kv_heads, d, 1.f / std::sqrt(float(d))};
  const std::vector<int32_t> cu{0, length};
  SelectionConfig config;
  config.score = score;
  config.score_tokens = score_tokens;
  config.pattern = pattern;
  config.order = selection_order;
  config.budget = static_cast<int64_t>(keep * length / 2);
  const SequenceTiles tiles{length, kBlock, 16, 1, 2, config.budget};
  Tensors t(shape, 42);
  const LayerPlanes planes =
      config.judges_by_planes() ? made_up_planes(shape, config.score_channels, 8 * shape.scale) : LayerPlanes{};
  SelectCase selected(shape, cu, {false}, {tiles}, config, true, int64_t{1} << 26, 0, planes);
  selected.run(shape, t.q.get(), t.k.get());
  if (pattern == SelectionPattern::mass && selection_order == SelectionOrder::causal) {
    // The threshold that meets the budget, as steering would find it.
    int64_t wanted = 0;
    for (int64_t tile = 0; tile < tiles.tiles(); ++tile)
      wanted += kv_heads * (tiles.visible(tile) - tiles.candidates(tile) +
                            std::min(tiles.free_quota(tile), tiles.candidates(tile)));
    float low = -16, high = 0;
    for (int i = 0; i < 14; ++i) {
      const float middle = (low + high) / 2;
      selected.thresholds = DeviceArray<float>(std::vector<float>(1, middle));
      selected.run(shape, t.q.get(), t.k.get());
      (std::ssize(selected.lists(shape).entries) > wanted ? low : high) = middle;
    }
  }
  const RowLists lists = selected.lists(shape);
  DeviceWork w(shape, cu, {false}, &lists, 132);
  const ForwardParams f = forward_params(shape, t, w);
  const BackwardParams b = backward_params(shape, t, w);
  const SelectParams p = selected.params(shape, t.q.get(), t.k.get());
  cudaStream_t beside;
  cudaEvent_t rows, columns;
  must(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "stream");
  must(cudaEventCreateWithFlags(&rows, cudaEventDisableTiming), "event");
  must(cudaEventCreateWithFlags(&columns, cudaEventDisableTiming), "event");
  const auto backward = taken_in_two(shape, w, cu, &lists) ? hopper_backward_deterministic : hopper_backward;
  const auto attend = [&] {
    hopper_forward(f, nullptr);
    backward(b, nullptr);
  };
  const auto all = [&] {
    hopper_select(p, nullptr);
    must(cudaEventRecord(rows, nullptr), "record");
    must(cudaStreamWaitEvent(beside, rows), "wait");
    list_columns(p, beside);
    w.order(shape, beside);
    must(cudaEventRecord(columns, beside), "record");
    hopper_forward(f, nullptr);
    must(cudaStreamWaitEvent(nullptr, columns), "wait");
    backward(b, nullptr);
  };
  // Alternately, so that both see the same clock; several in a row, so that nothing waits for the host.
  const int row = length > 65536 ? 1 : 6, rounds = length > 65536 ? 7 : 5;
  const auto in_a_row = [&](auto body, int repeats = 3) {
    return median_ms(
               [&] {
                 for (int i = 0; i < row; ++i) body();
               },
               repeats) /
           row;
  };
  double everything = 0;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile)
    everything += static_cast<double>(kv_heads * tiles.visible(tile));
  rest();
  const auto list_rows = [&] { hopper_select(p, nullptr); };
  const auto list = [&] { list_columns(p, nullptr); };
  const auto order = [&] { w.order(shape, nullptr); };
  const auto chain = [&] {
    list_rows();
    list();
    order();
  };
  const double rows_ms = in_a_row(list_rows, 11), columns_ms = in_a_row(list, 11), order_ms = in_a_row(order, 11);
  const double chain_ms = in_a_row(chain, 11);
  rest();
  std::vector<double> alone, together;
  for (int round = 0; round < rounds; ++round) {
    alone.push_back(in_a_row(attend));
    together.push_back(in_a_row(all));
  }
  std::sort(alone.begin(), alone.end());
  std::sort(together.begin(), together.end());
  std::printf(
      "%-30s rows %.4f ms, columns %.4f, order %.4f; attention %.3f: %.1f %%; all together %.3f: %.1f %%; %.1f %% "
      "listed\n",
      name.c_str(), rows_ms, columns_ms, order_ms, alone[rounds / 2], 100 * chain_ms / alone[rounds / 2],
      together[rounds / 2], 100 * (together[rounds / 2] - alone[rounds / 2]) / alone[rounds / 2],
      100. * static_cast<double>(lists.entries.size()) / everything);
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
  if (mode == "files" && argc > 6) {
    const auto number = [&](int i) { return std::atoi(argv[i]); };
    sb::gpu::run_files(argv[2], {number(6), number(3), number(4), number(5), 1.f / std::sqrt(float(number(5)))});
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
  run("10% 16:2 d128 128K qb16", 16, 2, 128, {131072}, 0.1, 16, false, det);
  run("dense 14:2 d64 32K", 14, 2, 64, {32768}, 1, 0, false, det);
  run("10% 14:2 d64 32K qb16", 14, 2, 64, {32768}, 0.1, 16, false, det);
  const std::string trained = "bench/attention/trained_lists_32k.bin";
  sb::gpu::run_file("trained 16:2 d128 32K qb128", trained, 16, 128, det);
  sb::gpu::run_file("trained 14:2 d64 32K qb128", trained, 14, 64, det);
  sb::gpu::run_selection("topk 10% 16:2 d128 32K", 16, 2, 128, 32768, 0.1);
  sb::gpu::run_selection("topk 10% 16:2 d128 128K", 16, 2, 128, 131072, 0.1);
  sb::gpu::run_selection("topk 10% 14:2 d64 32K", 14, 2, 64, 32768, 0.1);
  for (const auto& [heads, d, length] : {std::tuple{16, 128, 32768}, {14, 64, 32768}, {16, 128, 131072}}) {
    using enum sb::SelectionPattern;
    const std::string what =
        " 10% " + std::to_string(heads) + ":2 d" + std::to_string(d) + " " + std::to_string(length / 1024) + "K";
    sb::gpu::run_selection("mass" + what, heads, 2, d, length, 0.1, 0, mass);
    if (length > 32768) continue;
    sb::gpu::run_selection("topp" + what, heads, 2, d, length, 0.1, 0, topp);
    sb::gpu::run_selection("mass ahead" + what, heads, 2, d, length, 0.1, 0, mass, sb::SelectionOrder::lookahead);
  }
  for (const auto& [heads, d] : {std::pair{16, 128}, {14, 64}})
    for (const int length : {32768, 131072}) {
      using enum sb::SelectionPattern;
      const std::string what = " planes 10% " + std::to_string(heads) + ":2 d" + std::to_string(d) + " " +
                               std::to_string(length / 1024) + "K";
      for (const auto& [name, pattern] : {std::pair{"topk", topk}, {"mass", mass}})
        sb::gpu::run_selection(name + what, heads, 2, d, length, 0.1, 0, pattern, sb::SelectionOrder::causal,
                               sb::BlockScore::planes);
    }
  for (const int part : {64, 32, 16, 1}) {
    const std::string parts = "parts of " + std::to_string(part) + ", ";
    sb::gpu::run_selection(parts + "10% 16:2 d128 32K", 16, 2, 128, 32768, 0.1, part);
    sb::gpu::run_selection(parts + "10% 14:2 d64 32K", 14, 2, 64, 32768, 0.1, part);
  }
  sb::gpu::run_portable("portable dense 16:2 d128 16K", 16, 2, 128, 16384, 1);
  sb::gpu::run_portable("portable 10% 16:2 d128 32K", 16, 2, 128, 32768, 0.1);
  if (!all) return 0;
  // Scores so far apart that a row sees little but a few keys.
  run("peaked dense 16:2 d128 32K", 16, 2, 128, {32768}, 1, 0, false, false, 0, 0, 4);
  run("peaked 10% 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.1, 16, false, false, 0, 0, 4);
  run("peaked dense 14:2 d64 32K", 14, 2, 64, {32768}, 1, 0, false, false, 0, 0, 4);
  run("peaked 10% 14:2 d64 32K qb16", 14, 2, 64, {32768}, 0.1, 16, false, false, 0, 0, 4);
  run("dense 16:2 d128 8K", 16, 2, 128, {8192}, 1, 0, false, det);
  run("dense 16:2 d128 4x8K packed", 16, 2, 128, {8192, 8192, 8192, 8192}, 1, 0, false, det);
  run("dense 16:2 d128 32x1K packed", 16, 2, 128, std::vector<int>(32, 1024), 1, 0, false, det);
  run("dense 16:2 d128 8x4K packed", 16, 2, 128, std::vector<int>(8, 4096), 1, 0, false, det);
  run("dense 14:2 d64 32x1K packed", 14, 2, 64, std::vector<int>(32, 1024), 1, 0, false, det);
  run("dense 32:8 d128 16K", 32, 8, 128, {16384}, 1, 0, false, det);
  run("20% 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.2, 16, false, det);
  run("5% 16:2 d128 32K qb16", 16, 2, 128, {32768}, 0.05, 16, false, det);
  run("10% sink+local 16:2 d128 32K", 16, 2, 128, {32768}, 0.1, 16, false, det, 1, 2);
  run("10% 16:2 d128 64K qb16", 16, 2, 128, {65536}, 0.1, 16, false, det);
  run("10% 16:2 d128 64K qb128", 16, 2, 128, {65536}, 0.1, 128, false, det);
  run("5% 16:2 d128 128K qb16", 16, 2, 128, {131072}, 0.05, 16, false, det);
  run("10% 14:2 d64 32K qb128", 14, 2, 64, {32768}, 0.1, 128, false, det);
  run("10% 32:8 d128 32K qb32", 32, 8, 128, {32768}, 0.1, 32, false, det);
  return 0;
}
