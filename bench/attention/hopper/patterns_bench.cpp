// Times what the trainer calls on a GPU, for shapes and patterns that attention_hopper_bench has not: selection,
// forward and backward with the kernels chosen for them, the same with the portable ones, and for vertical_slash as
// many (query, key) pairs in plain blocks, lists per query head alike. Useful FLOPs: 4·d for every pair and query head
// forward, 2.5 times that backward. Operands are random, so that caps and budget decide how much is selected.
//   attention_patterns_bench [part of a case's name]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "attention/gpu/cuda_attention.h"
#include "core/random.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace sb {
namespace {

struct Case {
  const char* name;
  int heads, kv_heads, d;
  int64_t tokens;
  int block, query_block;
  int64_t columns = 0, diagonals = 0;  // vertical_slash; else topk
  int64_t budget = 8192;
};

// Device memory of bf16, normal numbers or nothing.
class Values {
 public:
  Values(int64_t count, uint64_t seed)
      : arena_(make_arena("values", count * 2, DeviceKind::cuda)), view_(arena_.allocate(DType::bf16, {count})) {
    if (seed == 0) return;
    // A table is enough: what matters is that neighbours differ.
    Random random(seed);
    std::vector<uint16_t> table(65521), host(count);
    for (uint16_t& x : table) {
      const float value = static_cast<float>(random.normal());
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      x = static_cast<uint16_t>(bits >> 16);
    }
    for (int64_t i = 0; i < count; ++i) host[i] = table[(i + i / 65521 * 97) % 65521];
    cuda::copy_and_wait(host.data(), view_.raw(), count * 2);
  }
  TensorView as(Shape shape) const { return {view_.raw(), DType::bf16, shape, DeviceKind::cuda}; }

 private:
  Arena arena_;
  TensorView view_;
};

class Bench {
 public:
  explicit Bench(const Case& c)
      : case_(c),
        shape_{c.heads, c.kv_heads, c.d, 1.f / std::sqrt(static_cast<float>(c.d))},
        wide_{c.tokens, c.heads, c.d},
        narrow_{c.tokens, c.kv_heads, c.d},
        q_(wide_.elements(), 1),
        k_(narrow_.elements(), 2),
        v_(narrow_.elements(), 3),
        dout_(wide_.elements(), 4),
        out_(wide_.elements(), 0),
        dq_(wide_.elements(), 0),
        dk_(narrow_.elements(), 0),
        dv_(narrow_.elements(), 0),
        lse_arena_(make_arena("lse", c.tokens * c.heads * 4, DeviceKind::cuda)),
        lse_(lse_arena_.allocate(DType::f32, {c.heads, c.tokens})),
        stream_(cuda::make_stream()) {}

  void run() {
    const CudaAttentionOptions options = options_of();
    const auto attention = make_cuda_attention(options);
    const auto state = attention->make_state();
    const double all = time(*attention, [&](const Exec& exec) { forward(exec, *attention, *state, false); });
    attention->take_report();
    run_once(*attention, [&](const Exec& exec) { forward(exec, *attention, *state, false); });
    const LayerAttention report = attention->take_report().total();
    const BlockIndex selected = read_block_index(*state, pool_);
    set_flops(selected);
    fmt::print("{}: {} pairs, {:.2f} %\n", case_.name, report.pairs, 100 * report.density());
    const double once = measure("  chosen kernels", *attention, *state);
    fmt::print("  selection and its lists {:.3f} ms\n", all - once);
    given(options_of(false, true), "  two kernels", selected);
    if (case_.tokens <= 32768) given(options_of(true), "  portable kernels", selected);
    if (case_.columns > 0) given(options, "  plain blocks", plain_blocks(report.pairs));
  }

 private:
  CudaAttentionOptions options_of(bool portable = false, bool deterministic = false) const {
    CudaAttentionOptions options;
    SelectionConfig& selection = options.attention.selection;
    options.attention.layers = 1;
    options.portable = portable;
    options.deterministic = deterministic;
    selection.score = BlockScore::moments;
    selection.block = case_.block;
    selection.query_block = case_.query_block;
    selection.budget = case_.budget;
    if (case_.columns > 0) {
      selection.pattern = SelectionPattern::vertical_slash;
      selection.order = SelectionOrder::lookahead;
      selection.vertical_cap = case_.columns;
      selection.slash_cap = case_.diagonals;
    }
    return options;
  }

  // About so many pairs in blocks alone, drawn evenly.
  BlockIndex plain_blocks(int64_t pairs) {
    BlockIndex index;
    BlockIndexBuilder builder;
    const int32_t cu[2] = {0, static_cast<int32_t>(case_.tokens)};
    builder.begin(index, {case_.block, 128, case_.heads}, cu, {}, 1);
    const double causal = static_cast<double>(case_.heads) * static_cast<double>(case_.tokens) *
                          static_cast<double>(case_.tokens + 1) / 2;
    const auto own = static_cast<double>(case_.heads * case_.tokens * (case_.block + 1) / 2);
    const double keep = (static_cast<double>(pairs) - own) / (causal - own);
    Random random(5);
    std::vector<IndexEntry> entries;
    for (int64_t row = 0; row < index.rows(); ++row) {
      entries.clear();
      const int last = (index.place_of(row).query_block * 128 + 127) / case_.block;
      for (int block = 0; block <= last; ++block)
        if (block * case_.block >= index.place_of(row).query_block * 128 || random.uniform() < keep)
          entries.push_back({static_cast<uint16_t>(block), 0});
      builder.set_row(0, row, entries);
    }
    builder.finish(pool_);
    return index;
  }

  void given(const CudaAttentionOptions& options, const char* name, const BlockIndex& index) {
    const auto attention = make_cuda_attention(options);
    const auto state = attention->make_state();
    run_once(*attention,
             [&](const Exec& exec) { write_block_index(index, *attention, exec, shape_, DType::bf16, *state); });
    set_flops(index);
    measure(name, *attention, *state);
  }

  void set_flops(const BlockIndex& index) {
    const int heads_per_list = case_.heads / index.shape().list_heads;
    flops_ = 4.0 * case_.d * static_cast<double>(index.token_pairs()) * heads_per_list;
  }

  // Milliseconds of the forward.
  double measure(const char* name, SelectingAttention& attention, AttentionState& state) {
    const double forward_ms = time(attention, [&](const Exec& exec) { forward(exec, attention, state, true); });
    const double backward_ms = time(attention, [&](const Exec& exec) {
      attention.backward(exec, 0, shape_, sequences(), operands(),
                         {dout_.as(wide_), dq_.as(wide_), dk_.as(narrow_), dv_.as(narrow_)}, state);
    });
    fmt::print("{:<24} {:8.3f} ms {:5.0f} TFLOP/s | {:8.3f} ms {:5.0f} TFLOP/s\n", name, forward_ms,
               flops_ / forward_ms / 1e9, backward_ms, 2.5 * flops_ / backward_ms / 1e9);
    std::fflush(stdout);
    return forward_ms;
  }

  PackedSequences sequences() const { return {cu_, {}}; }
  AttentionOperands operands() const { return {q_.as(wide_), k_.as(narrow_), v_.as(narrow_), out_.as(wide_), lse_}; }
  void forward(const Exec& exec, SelectingAttention& attention, AttentionState& state, bool replay) const {
    attention.forward(exec, 0, shape_, sequences(), operands(), state, replay);
  }

  void run_once(SelectingAttention& attention, const std::function<void(const Exec&)>& body) {
    const int64_t bytes = attention.scratch_bytes(shape_, case_.tokens, 1);
    if (bytes > scratch_.capacity()) scratch_ = make_arena("scratch", bytes, DeviceKind::cuda);
    body({.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch_});
    cuda::synchronize(stream_.get());
  }

  // Median after a rest, as the card remembers what it did before.
  double time(SelectingAttention& attention, const std::function<void(const Exec&)>& body) {
    for (int i = 0; i < 2; ++i) run_once(attention, body);
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    const auto begin = cuda::make_event(), end = cuda::make_event();
    std::vector<double> times;
    for (int i = 0; i < (case_.tokens > 65536 ? 5 : 11); ++i) {
      const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch_};
      body(exec);  // the device works while the host queues what is timed
      cuda::record(begin.get(), stream_.get());
      body(exec);
      cuda::record(end.get(), stream_.get());
      cuda::wait(end.get());
      times.push_back(cuda::milliseconds_between(begin.get(), end.get()));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Case case_;
  AttentionShape shape_;
  Shape wide_, narrow_;
  Values q_, k_, v_, dout_, out_, dq_, dk_, dv_;
  Arena lse_arena_;
  TensorView lse_;
  std::shared_ptr<void> stream_;
  Arena scratch_{"none", 0};
  ThreadPool pool_{4};
  std::vector<int32_t> cu_{0, static_cast<int32_t>(case_.tokens)};
  double flops_ = 0;
};

}  // namespace
}  // namespace sb

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const sb::Case cases[] = {
      {"vertical_slash 16:2 d128 32K", 16, 2, 128, 32768, 128, 128, 2048, 16},
      {"vertical_slash 14:2 d64 32K", 14, 2, 64, 32768, 128, 128, 2048, 16},
      {"vertical_slash 16:2 d128 128K", 16, 2, 128, 131072, 128, 128, 4096, 32},
      {"vertical_slash 14:2 d64 128K", 14, 2, 64, 131072, 128, 128, 4096, 32},
      {"vertical_slash block 64 16:2 d128 32K", 16, 2, 128, 32768, 64, 64, 2048, 32},
      {"topk block 64 16:2 d128 32K", 16, 2, 128, 32768, 64, 16, 0, 0, 1638},
      {"topk block 64 14:2 d64 32K", 14, 2, 64, 32768, 64, 16, 0, 0, 1638},
      {"topk block 128 16:2 d128 32K", 16, 2, 128, 32768, 128, 16, 0, 0, 1638},
      {"topk group 80 80:1 d64 32K", 80, 1, 64, 32768, 128, 16, 0, 0, 1638},
  };
  for (const sb::Case& c : cases)
    if (std::string(c.name).find(filter) != std::string::npos) sb::Bench(c).run();
  return 0;
}
