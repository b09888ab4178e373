#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/errors.h"
#include "python/bindings/bindings.h"
#include "python/bindings/packed_attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {
namespace {

// Memory of the caller: where it lies, and how many elements.
struct Memory {
  uintptr_t address = 0;
  int64_t count = 0;

  template <typename T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(address), static_cast<size_t>(count)};
  }
};

// What forward and backward have in common, in Python's words.
struct PackedCall {
  int layer;
  int64_t tokens;
  AttentionShape shape;
  Memory cu_seqlens, budgets, lists, planes, thresholds;
  Memory q, k, v, out, lse;

  PackedAttention::Call call() const {
    SB_USER_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
                  "{} heads are no multiple of {} kv heads", shape.heads, shape.kv_heads);
    SB_USER_CHECK(shape.head_dim >= 1 && shape.head_dim <= 256, "head_dim {}; 1 to 256 are supported", shape.head_dim);
    SB_USER_CHECK(cu_seqlens.count >= 1, "cu_seqlens is empty; it begins with 0 and ends with the number of tokens");
    PackedAttention::Call made;
    made.layer = layer;
    made.shape = shape;
    made.cu_seqlens = cu_seqlens.as<const int32_t>();
    made.budgets = budgets.as<const int32_t>();
    made.lists = lists.as<uint8_t>();
    made.planes = planes.as<const double>();
    made.thresholds = thresholds.as<const float>();
    made.operands = {queries(q), keys(k), keys(v), queries(out),
                     TensorView(reinterpret_cast<float*>(lse.address), {shape.heads, tokens})};
    return made;
  }
  TensorView queries(const Memory& memory) const { return view(memory, shape.heads); }
  TensorView keys(const Memory& memory) const { return view(memory, shape.kv_heads); }

 private:
  TensorView view(const Memory& memory, int heads) const {
    const int64_t elements = tokens * heads * shape.head_dim;
    SB_USER_CHECK(memory.count == elements, "a tensor has {} elements where {} tokens of {} heads of {} have {}",
                  memory.count, tokens, heads, shape.head_dim, elements);
    return TensorView(reinterpret_cast<float*>(memory.address), {tokens, heads, shape.head_dim});
  }
};

SelectionConfig selection_config(const std::string& pattern, const std::string& selection, const std::string& score,
                                 int score_channels, int score_tokens, int block, int query_block, int64_t budget,
                                 int sink_blocks, int local_blocks, int step, int64_t dense_below, double coverage,
                                 std::vector<int64_t> dense_layers) {
  SelectionConfig config;
  config.pattern = parse_selection_pattern(pattern);
  config.order = parse_selection_order(selection);
  config.score = parse_block_score(score);
  config.score_channels = score_channels;
  config.score_tokens = score_tokens;
  config.block = block;
  config.query_block = query_block;
  config.budget = budget;
  config.sink_blocks = sink_blocks;
  config.local_blocks = local_blocks;
  config.step = step;
  config.dense_below = dense_below;
  config.coverage = coverage;
  config.dense_layers = std::move(dense_layers);
  return config;
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Memory>(module, "Memory", "Memory of the caller: its address and how many elements it has.")
      .def(nb::init<>())
      .def(nb::init<uintptr_t, int64_t>(), "address"_a, "count"_a);
  nb::class_<PackedCall>(module, "PackedCall", "The arguments of an attention over packed sequences.")
      .def(
          "__init__",
          [](PackedCall* self, int layer, int64_t tokens, int heads, int kv_heads, int head_dim, float scale,
             Memory cu_seqlens, Memory budgets, Memory lists, Memory planes, Memory thresholds, Memory q, Memory k,
             Memory v, Memory out, Memory lse) {
            new (self) PackedCall{layer,      tokens,     {heads, kv_heads, head_dim, scale},
                                  cu_seqlens, budgets,    lists,
                                  planes,     thresholds, q,
                                  k,          v,          out,
                                  lse};
          },
          nb::kw_only(), "layer"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "cu_seqlens"_a,
          "budgets"_a, "lists"_a, "planes"_a, "thresholds"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a);
  nb::class_<PackedAttention>(module, "PackedAttention")
      .def(
          "__init__",
          [](PackedAttention* self, const std::string& pattern, const std::string& selection, const std::string& score,
             int score_channels, int score_tokens, int block, int query_block, int64_t budget, int sink_blocks,
             int local_blocks, int step, int64_t dense_below, double coverage, std::vector<int64_t> dense_layers,
             int threads) {
            new (self) PackedAttention(
                selection_config(pattern, selection, score, score_channels, score_tokens, block, query_block, budget,
                                 sink_blocks, local_blocks, step, dense_below, coverage, std::move(dense_layers)),
                threads);
          },
          nb::kw_only(), "pattern"_a, "selection"_a, "score"_a, "score_channels"_a, "score_tokens"_a, "block"_a,
          "query_block"_a, "budget"_a, "sink_blocks"_a, "local_blocks"_a, "step"_a, "dense_below"_a, "coverage"_a,
          "dense_layers"_a, "threads"_a)
      .def(
          "forward",
          [](PackedAttention& self, const PackedCall& call, Memory counts, Memory sums) {
            self.forward(call.call(), {counts.as<int64_t>(), sums.as<double>()});
          },
          "call"_a, "counts"_a, "sums"_a)
      .def(
          "backward",
          [](PackedAttention& self, const PackedCall& call, Memory dout, Memory dq, Memory dk, Memory dv) {
            self.backward(call.call(), {call.queries(dout), call.queries(dq), call.keys(dk), call.keys(dv)});
          },
          "call"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a);
}

}  // namespace sb::python
