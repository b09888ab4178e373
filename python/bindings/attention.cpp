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

template <typename T>
std::span<T> memory(uintptr_t address, size_t count) {
  return {reinterpret_cast<T*>(address), count};
}

// The arguments of a call as they were when it was made, for its forward and its backward: what is small. Tensors come
// as addresses, with the sizes that follow from the shapes.
class CallArguments {
 public:
  CallArguments(int layer, int64_t tokens, const AttentionShape& shape, bool bf16, bool cuda)
      : layer_(layer),
        tokens_(tokens),
        shape_(shape),
        dtype_(bf16 ? DType::bf16 : DType::f32),
        device_(cuda ? DeviceKind::cuda : DeviceKind::cpu) {
    SB_USER_CHECK(layer >= 0, "layer {}; they count from 0", layer);
    SB_USER_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
                  "{} heads are no multiple of {} kv heads", shape.heads, shape.kv_heads);
    SB_USER_CHECK(shape.head_dim >= 1 && shape.head_dim <= 256, "head_dim {}; 1 to 256 are supported", shape.head_dim);
  }

  void set_lengths(uintptr_t address, size_t count) {
    SB_USER_CHECK(count >= 1, "cu_seqlens is empty; it begins with 0 and ends with the number of tokens");
    copy(address, count, cu_seqlens_);
  }
  void set_budgets(uintptr_t address, size_t count) { copy(address, count, budgets_); }
  void set_planes(uintptr_t address, size_t count) { copy(address, count, planes_); }
  void set_thresholds(uintptr_t address, size_t count) { copy(address, count, thresholds_); }

  PackedCall call(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse, uintptr_t lists,
                  size_t list_bytes) const {
    PackedCall made;
    made.layer = layer_;
    made.shape = shape_;
    made.cu_seqlens = cu_seqlens_;
    made.budgets = budgets_;
    made.lists = memory<uint8_t>(lists, list_bytes);
    made.planes = planes_;
    made.thresholds = thresholds_;
    made.operands = {queries(q), keys(k), keys(v), queries(out),
                     TensorView(reinterpret_cast<void*>(lse), DType::f32, {shape_.heads, tokens_}, device_)};
    return made;
  }
  AttentionGradients gradients(uintptr_t dout, uintptr_t dq, uintptr_t dk, uintptr_t dv) const {
    return {queries(dout), queries(dq), keys(dk), keys(dv)};
  }
  // Counts, then sums, as far as the configuration has them.
  PackedSeen seen(const SelectionConfig& config, uintptr_t address) const {
    PackedSeen seen;
    if (config.learns_thresholds()) seen.counts = memory<int64_t>(address, 2 * (cu_seqlens_.size() - 1));
    if (config.judges_by_planes())
      seen.sums = memory<double>(address + seen.counts.size_bytes(),
                                 static_cast<size_t>(1 + 3 * shape_.kv_heads * shape_.head_dim));
    return seen;
  }

 private:
  template <typename T>
  static void copy(uintptr_t address, size_t count, std::vector<T>& to) {
    const auto* from = reinterpret_cast<const T*>(address);
    to.assign(from, from + count);
  }
  TensorView queries(uintptr_t address) const { return view(address, shape_.heads); }
  TensorView keys(uintptr_t address) const { return view(address, shape_.kv_heads); }
  TensorView view(uintptr_t address, int heads) const {
    return TensorView(reinterpret_cast<void*>(address), dtype_, {tokens_, heads, shape_.head_dim}, device_);
  }

  int layer_;
  int64_t tokens_;
  AttentionShape shape_;
  DType dtype_;
  DeviceKind device_;
  std::vector<int32_t> cu_seqlens_, budgets_;
  std::vector<uint32_t> planes_;
  std::vector<float> thresholds_;
};

// What an AttentionConfig says.
struct Settings {
  SelectionConfig selection;
  int64_t largest_budget = 0;
};

// UserError for what check_selection_config() leaves to those who read run.yaml.
void check_settings(const Settings& settings) {
  const SelectionConfig& config = settings.selection;
  SB_USER_CHECK(settings.largest_budget >= 0, "attention.largest_budget: {}; must not be negative",
                settings.largest_budget);
  SB_USER_CHECK(config.dense_below >= -1, "attention.dense_below: {}; must be -1 (the budget) or a number of tokens",
                config.dense_below);
  for (const int64_t layer : config.dense_layers)
    SB_USER_CHECK(layer >= 0, "attention.dense_layers: there is no layer {}; they count from 0", layer);
}

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
          [](PackedAttention& self, const CallArguments& call, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
             uintptr_t lse, uintptr_t lists, size_t list_bytes, uintptr_t seen) {
            self.forward(call.call(q, k, v, out, lse, lists, list_bytes), call.seen(self.config(), seen));
          },
          "call"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "lists"_a, "list_bytes"_a, "seen"_a)
      .def(
          "backward",
          [](PackedAttention& self, const CallArguments& call, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
             uintptr_t lse, uintptr_t lists, size_t list_bytes, uintptr_t dout, uintptr_t dq, uintptr_t dk,
             uintptr_t dv) {
            self.backward(call.call(q, k, v, out, lse, lists, list_bytes), call.gradients(dout, dq, dk, dv));
          },
          "call"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "lists"_a, "list_bytes"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a);
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
          [](const PackedCudaAttention& self, int64_t tokens, int heads, int kv_heads, int head_dim) {
            return self.scratch_bytes({heads, kv_heads, head_dim, 1.0f}, tokens);
          },
          "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a)
      .def(
          "forward",
          [](PackedCudaAttention& self, const CallArguments& call, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
             uintptr_t lse, uintptr_t lists, size_t list_bytes, uintptr_t seen, uintptr_t scratch, size_t scratch_bytes,
             uintptr_t host_lists, size_t host_list_bytes) {
            self.forward(call.call(q, k, v, out, lse, lists, list_bytes), call.seen(self.config(), seen),
                         memory<uint8_t>(scratch, scratch_bytes), memory<uint8_t>(host_lists, host_list_bytes));
          },
          "call"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "lists"_a, "list_bytes"_a, "seen"_a, "scratch"_a,
          "scratch_bytes"_a, "host_lists"_a = 0, "host_list_bytes"_a = 0)
      .def(
          "backward",
          [](PackedCudaAttention& self, const CallArguments& call, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
             uintptr_t lse, uintptr_t lists, size_t list_bytes, uintptr_t dout, uintptr_t dq, uintptr_t dk,
             uintptr_t dv, uintptr_t scratch, size_t scratch_bytes) {
            self.backward(call.call(q, k, v, out, lse, lists, list_bytes), call.gradients(dout, dq, dk, dv),
                          memory<uint8_t>(scratch, scratch_bytes));
          },
          "call"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "lists"_a, "list_bytes"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a,
          "scratch"_a, "scratch_bytes"_a);
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
  nb::class_<Settings>(module, "AttentionSettings", "What an AttentionConfig says.")
      .def(
          "__init__",
          [](Settings* self, const std::string& pattern, const std::string& selection, const std::string& score,
             int score_channels, int score_tokens, int block, int query_block, int64_t budget, int64_t largest_budget,
             int sink_blocks, int local_blocks, int step, int64_t dense_below, double coverage,
             std::vector<int64_t> dense_layers) {
            Settings settings{
                selection_config(pattern, selection, score, score_channels, score_tokens, block, query_block, budget,
                                 sink_blocks, local_blocks, step, dense_below, coverage, std::move(dense_layers)),
                largest_budget};
            check_settings(settings);
            new (self) Settings(std::move(settings));
          },
          nb::kw_only(), "pattern"_a, "selection"_a, "score"_a, "score_channels"_a, "score_tokens"_a, "block"_a,
          "query_block"_a, "budget"_a, "largest_budget"_a, "sink_blocks"_a, "local_blocks"_a, "step"_a, "dense_below"_a,
          "coverage"_a, "dense_layers"_a)
      .def(
          "score_channels_of",
          [](const Settings& settings, int head_dim) {
            SelectionConfig config = settings.selection;
            settle_score_channels(config, head_dim);
            return config.score_channels;
          },
          "head_dim"_a, "As many as heads of this width use; an error where more were asked for than they have.");
  nb::class_<CallArguments>(module, "PackedCall",
                            "What a call of attention over packed sequences has beside its tensors.")
      .def(
          "__init__",
          [](CallArguments* self, int layer, int64_t tokens, int heads, int kv_heads, int head_dim, float scale,
             bool bf16, bool cuda, uintptr_t cu_seqlens, size_t lengths, uintptr_t budgets, size_t budget_count,
             uintptr_t planes, size_t plane_words, uintptr_t thresholds, size_t threshold_count) {
            CallArguments made(layer, tokens, {heads, kv_heads, head_dim, scale}, bf16, cuda);
            made.set_lengths(cu_seqlens, lengths);
            made.set_budgets(budgets, budget_count);
            made.set_planes(planes, plane_words);
            made.set_thresholds(thresholds, threshold_count);
            new (self) CallArguments(std::move(made));
          },
          "layer"_a, "tokens"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "bf16"_a, "cuda"_a, "cu_seqlens"_a,
          "lengths"_a, "budgets"_a, "budget_count"_a, "planes"_a, "plane_words"_a, "thresholds"_a, "threshold_count"_a);
  bind_cpu_attention(module);
  bind_cuda_attention(module);
  bind_learner(module);
}

}  // namespace sb::python
