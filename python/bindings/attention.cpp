#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/errors.h"
#include "python/bindings/bindings.h"
#include "python/bindings/packed_attention.h"
#include "python/bindings/packed_cuda_attention.h"
#include "python/bindings/selection_learner.h"

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
struct CallArguments {
  int layer;
  int64_t tokens;
  AttentionShape shape;
  DType dtype;
  DeviceKind device;
  Memory cu_seqlens, budgets, lists, planes, thresholds;
  Memory q, k, v, out, lse;

  PackedCall call() const {
    SB_USER_CHECK(layer >= 0, "layer {}; they count from 0", layer);
    SB_USER_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
                  "{} heads are no multiple of {} kv heads", shape.heads, shape.kv_heads);
    SB_USER_CHECK(shape.head_dim >= 1 && shape.head_dim <= 256, "head_dim {}; 1 to 256 are supported", shape.head_dim);
    SB_USER_CHECK(cu_seqlens.count >= 1, "cu_seqlens is empty; it begins with 0 and ends with the number of tokens");
    PackedCall made;
    made.layer = layer;
    made.shape = shape;
    made.cu_seqlens = cu_seqlens.as<const int32_t>();
    made.budgets = budgets.as<const int32_t>();
    made.lists = lists.as<uint8_t>();
    made.planes = planes.as<const uint32_t>();
    made.thresholds = thresholds.as<const float>();
    made.operands = {queries(q), keys(k), keys(v), queries(out),
                     TensorView(reinterpret_cast<void*>(lse.address), DType::f32, {shape.heads, tokens}, device)};
    return made;
  }
  TensorView queries(const Memory& memory) const { return view(memory, shape.heads); }
  TensorView keys(const Memory& memory) const { return view(memory, shape.kv_heads); }

 private:
  TensorView view(const Memory& memory, int heads) const {
    const int64_t elements = tokens * heads * shape.head_dim;
    SB_USER_CHECK(memory.count == elements, "a tensor has {} elements where {} tokens of {} heads of {} have {}",
                  memory.count, tokens, heads, shape.head_dim, elements);
    return TensorView(reinterpret_cast<void*>(memory.address), dtype, {tokens, heads, shape.head_dim}, device);
  }
};

// What an AttentionConfig says.
struct Settings {
  SelectionConfig selection;
  int64_t largest_budget = 0;
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

void bind_cpu_attention(nb::module_& module) {
  nb::class_<PackedAttention>(module, "PackedAttention")
      .def(
          "__init__",
          [](PackedAttention* self, const Settings& settings, int threads) {
            new (self) PackedAttention(settings.selection, threads);
          },
          "settings"_a, "threads"_a)
      .def(
          "forward",
          [](PackedAttention& self, const CallArguments& call, Memory counts, Memory sums) {
            self.forward(call.call(), {counts.as<int64_t>(), sums.as<double>()});
          },
          "call"_a, "counts"_a, "sums"_a)
      .def(
          "backward",
          [](PackedAttention& self, const CallArguments& call, Memory dout, Memory dq, Memory dk, Memory dv) {
            self.backward(call.call(), {call.queries(dout), call.queries(dq), call.keys(dk), call.keys(dv)});
          },
          "call"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a);
}

void bind_cuda_attention(nb::module_& module) {
  nb::class_<PackedCudaAttention>(module, "PackedCudaAttention", "On one device and one of its streams (the address).")
      .def(
          "__init__",
          [](PackedCudaAttention* self, const Settings& settings, int device, uintptr_t stream, bool deterministic,
             bool portable) {
            new (self) PackedCudaAttention(settings.selection, {settings.largest_budget, deterministic, portable},
                                           device, reinterpret_cast<void*>(stream));
          },
          "settings"_a, "device"_a, "stream"_a, nb::kw_only(), "deterministic"_a, "portable"_a)
      .def(
          "scratch_bytes",
          [](const PackedCudaAttention& self, int64_t tokens, int heads, int kv_heads, int head_dim, float scale) {
            return self.scratch_bytes({heads, kv_heads, head_dim, scale}, tokens);
          },
          "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a)
      .def(
          "forward",
          [](PackedCudaAttention& self, const CallArguments& call, Memory counts, Memory sums, Memory scratch,
             Memory host_lists) {
            self.forward(call.call(), {counts.as<int64_t>(), sums.as<double>()}, scratch.as<uint8_t>(),
                         host_lists.as<uint8_t>());
          },
          "call"_a, "counts"_a, "sums"_a, "scratch"_a, "host_lists"_a = Memory())
      .def(
          "backward",
          [](PackedCudaAttention& self, const CallArguments& call, Memory dout, Memory dq, Memory dk, Memory dv,
             Memory scratch) {
            self.backward(call.call(), {call.queries(dout), call.queries(dq), call.keys(dk), call.keys(dv)},
                          scratch.as<uint8_t>());
          },
          "call"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a, "scratch"_a);
}

void bind_learner(nb::module_& module) {
  using Integers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  const auto span_of = [](const auto& array) { return std::span(array.data(), array.size()); };
  nb::class_<SelectionLearner>(module, "SelectionLearner", "What selection learns from step to step.")
      .def(
          "__init__",
          [](SelectionLearner* self, const Settings& settings) { new (self) SelectionLearner(settings.selection); },
          "settings"_a)
      .def(
          "planes",
          [](const SelectionLearner& self, int layer, int heads, int kv_heads, int head_dim, float scale) {
            std::vector<uint32_t> words = self.planes(layer, {heads, kv_heads, head_dim, scale});
            const size_t count = words.size();
            return numpy_array<uint32_t>(std::move(words), {count});
          },
          "layer"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a,
          "What PackedCall takes; empty where the layer has no statistics yet.")
      .def(
          "thresholds",
          [=](const SelectionLearner& self, int layer, const Integers& cu_seqlens, const Integers& budgets) {
            std::vector<float> found = self.thresholds(layer, span_of(cu_seqlens), span_of(budgets));
            const size_t count = found.size();
            return numpy_array<float>(std::move(found), {count});
          },
          "layer"_a, "cu_seqlens"_a, "budgets"_a)
      .def(
          "observe",
          [=](SelectionLearner& self, int layer, const Integers& cu_seqlens, const Integers& budgets,
              const nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& counts) {
            self.observe_counts(layer, span_of(cu_seqlens), span_of(budgets), span_of(counts));
          },
          "layer"_a, "cu_seqlens"_a, "budgets"_a, "counts"_a)
      .def(
          "observe_sums",
          [=](SelectionLearner& self, int layer,
              const nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>& sums) {
            self.observe_sums(layer, span_of(sums));
          },
          "layer"_a, "sums"_a)
      .def("take_masses", &SelectionLearner::take_masses,
           "Counts so far, (layer, length class, budget class, selected, wanted) each; they are forgotten here.")
      .def("add_masses", &SelectionLearner::add_masses, "masses"_a)
      .def("learn", &SelectionLearner::learn)
      .def("state", &SelectionLearner::state)
      .def("set_state", &SelectionLearner::set_state, "planes"_a, "thresholds"_a);
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Memory>(module, "Memory", "Memory of the caller: its address and how many elements it has.")
      .def(nb::init<>())
      .def(nb::init<uintptr_t, int64_t>(), "address"_a, "count"_a);
  nb::class_<Settings>(module, "AttentionSettings", "What an AttentionConfig says.")
      .def(
          "__init__",
          [](Settings* self, const std::string& pattern, const std::string& selection, const std::string& score,
             int score_channels, int score_tokens, int block, int query_block, int64_t budget, int64_t largest_budget,
             int sink_blocks, int local_blocks, int step, int64_t dense_below, double coverage,
             std::vector<int64_t> dense_layers) {
            new (self) Settings{
                selection_config(pattern, selection, score, score_channels, score_tokens, block, query_block, budget,
                                 sink_blocks, local_blocks, step, dense_below, coverage, std::move(dense_layers)),
                largest_budget};
          },
          nb::kw_only(), "pattern"_a, "selection"_a, "score"_a, "score_channels"_a, "score_tokens"_a, "block"_a,
          "query_block"_a, "budget"_a, "largest_budget"_a, "sink_blocks"_a, "local_blocks"_a, "step"_a, "dense_below"_a,
          "coverage"_a, "dense_layers"_a);
  nb::class_<CallArguments>(module, "PackedCall", "The arguments of an attention over packed sequences.")
      .def(
          "__init__",
          [](CallArguments* self, int layer, int64_t tokens, int heads, int kv_heads, int head_dim, float scale,
             bool bf16, bool cuda, Memory cu_seqlens, Memory budgets, Memory lists, Memory planes, Memory thresholds,
             Memory q, Memory k, Memory v, Memory out, Memory lse) {
            new (self) CallArguments{layer,
                                     tokens,
                                     {heads, kv_heads, head_dim, scale},
                                     bf16 ? DType::bf16 : DType::f32,
                                     cuda ? DeviceKind::cuda : DeviceKind::cpu,
                                     cu_seqlens,
                                     budgets,
                                     lists,
                                     planes,
                                     thresholds,
                                     q,
                                     k,
                                     v,
                                     out,
                                     lse};
          },
          "layer"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "bf16"_a, "cuda"_a, "cu_seqlens"_a,
          "budgets"_a, "lists"_a, "planes"_a, "thresholds"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a);
  bind_cpu_attention(module);
  bind_cuda_attention(module);
  bind_learner(module);
}

}  // namespace sb::python
