#include "cli/profile/profile_engine.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "attention/factory/make_attention.h"
#include "attention/forwarding_attention.h"
#include "core/errors.h"
#include "core/random.h"
#include "device/context.h"
#include "device/cuda.h"
#include "device/event.h"
#include "device/memory.h"
#include "model/stage/stage.h"
#include "ops/adamw.h"
#include "run/config/recompute_words.h"
#include "run/machine.h"

namespace sb {
namespace {

// Microseconds between two points of the queue, read when the device has passed them. Events are made once and used
// again. What one thread of the CPU computes is timed by its processor time: by the clock, whatever else runs on the
// core would make long operations longer, which it interrupts, and leave short ones as they are.
class Stopwatch {
 public:
  Stopwatch(DeviceKind device, int threads) : device_(device), one_thread_(device == DeviceKind::cpu && threads == 1) {}
  void start(const Exec& exec) {
    if (used_ == spans_.size()) spans_.push_back({DeviceEvent(device_), DeviceEvent(device_)});
    spans_[used_].begin.record(exec);
    spans_[used_].processor_us = one_thread_ ? -processor_us() : 0;
  }
  void stop(const Exec& exec) {
    if (one_thread_) spans_[used_].processor_us += processor_us();
    spans_[used_++].end.record(exec);
  }
  // Of all spans since the last call.
  double take() {
    double sum = 0;
    for (size_t i = 0; i < used_; ++i)
      sum += one_thread_ ? spans_[i].processor_us
                         : 1e3 * DeviceEvent::milliseconds_between(spans_[i].begin, spans_[i].end);
    used_ = 0;
    return sum;
  }

 private:
  struct Span {
    DeviceEvent begin, end;
    double processor_us = 0;
  };
  static double processor_us() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
  }
  DeviceKind device_;
  bool one_thread_;
  std::vector<Span> spans_;
  size_t used_ = 0;
};

// Passes everything on and takes the time. Forward runs twice when the parts are wanted: once with selection, once with
// the selections of the first run. A forward in the course of backward (recompute) counts there.
class TimedAttention final : public ForwardingAttention {
 public:
  TimedAttention(Attention& inner, DeviceKind device, int threads)
      : ForwardingAttention(inner), selecting_(device, threads), again_(device, threads), backward_(device, threads) {}
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    const auto timed = [&](Stopwatch& watch, bool with_replay) {
      if (paused_) return ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, with_replay);
      watch.start(exec);
      ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, with_replay);
      watch.stop(exec);
    };
    if (replay) return timed(backward_, true);
    timed(selecting_, false);
    if (parts) timed(again_, true);
  }
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    if (paused_) return ForwardingAttention::backward(exec, layer, shape, sequences, operands, gradients, state);
    backward_.start(exec);
    ForwardingAttention::backward(exec, layer, shape, sequences, operands, gradients, state);
    backward_.stop(exec);
  }

  // All layers since the last call, when the device has passed them.
  struct Times {
    double spent_forward, forward, backward, selection;
  };
  Times take() {
    const double first = selecting_.take(), again = again_.take(), backward = backward_.take();
    return {first + again, again, backward, std::max(0.0, first - again)};
  }
  bool parts = true;
  // Calls that are not to be timed.
  void pause(bool paused) { paused_ = paused; }

 private:
  bool paused_ = false;
  Stopwatch selecting_, again_, backward_;
};

ModelConfig model_of(const ModelShape& shape, int layers) {
  ModelConfig config;
  config.vocab_size = shape.vocabulary;
  config.hidden_size = shape.hidden;
  config.intermediate_size = shape.intermediate;
  config.layers = layers;
  config.heads = static_cast<int>(shape.heads);
  config.kv_heads = static_cast<int>(shape.kv_heads);
  config.head_dim = static_cast<int>(shape.head_dim);
  config.tie_word_embeddings = shape.tied;
  config.qkv_bias = true;
  return config;
}

SelectionConfig selection_of(const AttentionSpec& spec) {
  SelectionConfig selection;
  selection.pattern = parse_selection_pattern(spec.pattern);
  selection.score = parse_block_score(spec.score);
  if (spec.score_channels > 0) selection.score_channels = static_cast<int>(spec.score_channels);
  selection.block = static_cast<int>(spec.block);
  selection.query_block = static_cast<int>(spec.query_block);
  selection.score_tokens = static_cast<int>(spec.score_tokens);
  selection.budget = spec.budget;
  selection.sink_blocks = static_cast<int>(spec.sink_blocks);
  selection.local_blocks = static_cast<int>(spec.local_blocks);
  selection.dense_below = 0;  // the shapes say themselves what is dense
  return selection;
}

std::unique_ptr<Attention> attention_of(const ProfileEngineOptions& profile, const SelectionConfig& selection) {
  SparseAttention::Options options;
  options.selection = selection;
  options.layers = profile.layers;
  options.largest_budget = profile.max_tokens;
  return make_attention(options, profile.device);
}

// Normal numbers, from a pattern: the exact initialisation of a large vocabulary takes longer than the measurement.
// Queries and keys are large enough that blocks differ: where all weigh the same, no threshold parts them.
void randomize(ParameterSet& parameters, int64_t hidden) {
  constexpr double kDeviation = 0.02, kOfQueries = 2.5;
  std::vector<float> pattern((1 << 20) + 7);
  Random random(1);
  for (float& value : pattern) value = static_cast<float>(kDeviation * random.normal());
  const auto larger = static_cast<float>(kOfQueries / (kDeviation * std::sqrt(static_cast<double>(hidden))));
  const HostCopy values = parameters.host_values();
  for (int i = 0; i < parameters.count(); ++i) {
    const TensorView value = parameters.part(values.view(), i);
    for (int64_t e = 0; e < value.elements(); e += std::ssize(pattern))
      std::copy_n(pattern.begin(), std::min<int64_t>(std::ssize(pattern), value.elements() - e), value.f32() + e);
    const Parameter& parameter = parameters.parameter(i);
    if (parameter.name.ends_with("norm.weight")) std::fill_n(value.f32(), value.elements(), 1.0f);
    for (const Parameter::Part& part : parameter.parts)  // of the fused product
      if (part.hf_name.ends_with("q_proj.weight") || part.hf_name.ends_with("k_proj.weight")) {
        const TensorView rows = value.rows(part.row_begin, part.row_end);
        for (int64_t e = 0; e < rows.elements(); ++e) rows.f32()[e] *= larger;
      }
  }
  parameters.store_values(values);
}

void randomize(Stage& stage, int64_t hidden) {
  randomize(stage.parameters(), hidden);
  if (stage.options().lora.enabled()) randomize(stage.frozen_parameters(), hidden);
}

// So much is written before a measurement on CUDA, so that the host is ahead of the device by then, as it is in
// training: about a millisecond.
constexpr int64_t kHeadStart = int64_t{3} << 30;

// Thresholds of `mass` are settled when pairs are as near to the budget, or after so many forwards.
constexpr double kSettled = 0.03;
constexpr int kSettling = 8;

}  // namespace

struct ProfileEngine::Implementation {
  ProfileEngineOptions options;
  ModelConfig config;
  SelectionConfig selection;
  ThreadPool pool;
  std::unique_ptr<Attention> inner;
  SelectingAttention& selecting;  // the same
  TimedAttention attention;
  LearnedSelection learned;
  MeasuredShape settled;  // the last shape whose thresholds were looked for
  DeviceContext context;
  std::unique_ptr<Stage> whole, middle;
  Arena memory;
  TensorView input, gradient, head_start;
  Stopwatch forward, backward;

  Implementation(const ModelShape& shape, const ProfileEngineOptions& given)
      : options(given),
        config(model_of(shape, given.layers)),
        selection(selection_of(given.spec)),
        pool(given.threads > 0 ? given.threads : available_cores()),
        inner(attention_of(given, selection)),
        selecting(dynamic_cast<SelectingAttention&>(*inner)),
        attention(*inner, given.device, pool.threads()),
        context(given.device, pool, norm_scratch_bytes(given.device)),
        memory(make_arena("profile", 2 * Arena::rounded(given.max_tokens * shape.hidden * 4) + head_start_bytes(),
                          given.device)),
        forward(given.device, pool.threads()),
        backward(given.device, pool.threads()) {
    StageOptions stage;
    stage.device = options.device;
    stage.dtype = options.device == DeviceKind::cuda ? kCudaDType : DType::f32;
    stage.recompute = value_of(kRecomputeWords, options.recompute, "--recompute");
    stage.max_micro_batch_tokens = stage.max_sequence_length = stage.max_cut_sequence = options.max_tokens;
    stage.slots = 2;  // a piece, and all that comes before it
    if (options.device == DeviceKind::cuda) stage.loss_chunk = 4096;
    stage.last_layer = options.layers;
    stage.lora = options.lora;
    whole = std::make_unique<Stage>(config, stage, attention, pool.threads());
    randomize(*whole, shape.hidden);
    stage.first_layer = 1;
    stage.last_layer = options.layers - 1;
    middle = std::make_unique<Stage>(config, stage, attention, pool.threads());
    randomize(*middle, shape.hidden);
    input = noise(stage.dtype);
    gradient = noise(stage.dtype);
    head_start = memory.allocate(DType::f32, {head_start_bytes() / 4});
    if (selection.judges_by_planes()) first_look();
  }

  // What planes are selected by: a dense forward, as a run without statistics begins.
  void first_look() {
    const int64_t tokens = std::min(options.max_tokens, kFirstLookTokens);
    evaluate({{tokens}, {tokens}}, *whole);
    learn_of({{tokens}, {tokens}});
  }

  void evaluate(const MeasuredShape& shape, Stage& stage) {
    const MicroBatch batch = micro_batch(shape);
    attention.pause(true);
    stage.evaluate(context.exec(), batch, 0, &stage == middle.get() ? input.rows(0, batch.size()) : TensorView());
    context.synchronize();
    attention.pause(false);
  }

  // Learns from what was selected since the last call, all of the shape, as a training step does. Returns the pairs
  // over those that its budgets ask for.
  double learn_of(const MeasuredShape& shape) {
    const SelectionObservations seen = selecting.take_observations();
    learned = learn(learned, seen);
    selecting.use(learned);
    MassCounts counts;
    for (const auto& [key, of_class] : seen.masses) counts += of_class;
    if (counts.wanted == 0) return 1;
    double given = 0, wanted = 0, selected_pairs = 0;
    for (size_t i = 0; i < shape.tokens.size(); ++i) {
      const SequenceTiles tiles = sequence_tiles(selection, shape.tokens[i], shape.budgets[i]);
      if (tiles.everything_fits()) continue;
      const bool piece = shape.piece.end > 0;
      const int64_t begin = piece ? shape.piece.begin : 0, end = piece ? shape.piece.end : tiles.tokens;
      for (int64_t tile = begin / tiles.query_block; tiles.begin(tile) < end; ++tile) {
        given += static_cast<double>(tiles.given(tile));
        wanted += static_cast<double>(tiles.wanted(tile));
      }
      selected_pairs += work_of(options.spec, shape.tokens[i], shape.piece, shape.budgets[i]).pairs;
    }
    const double met = static_cast<double>(counts.selected) / static_cast<double>(counts.wanted);
    const double of_selected = (given + met * wanted) / (given + wanted);
    return 1 + (of_selected - 1) * selected_pairs / shape.work(options.spec).pairs;
  }

  // `mass` learns its thresholds from step to step, and other layers take what those in the middle have found.
  void settle(const MeasuredShape& shape) {
    if (!selection.learns_thresholds() || shape.work(options.spec).scores == 0) return;
    if (shape.tokens == settled.tokens && shape.budgets == settled.budgets) return;
    const MeasuredShape all{shape.tokens, shape.budgets};
    settled = all;
    for (int i = 0; i < kSettling; ++i) {
      evaluate(all, *middle);
      if (std::abs(learn_of(all) - 1) < kSettled) break;
    }
    const auto found = learned.thresholds;
    for (const auto& [key, threshold] : found)
      if (key.layer == 1)
        for (int layer = 0; layer < options.layers; ++layer)
          learned.thresholds.try_emplace({layer, key.length_class, key.budget_class}, threshold);
    selecting.use(learned);
  }

  int64_t head_start_bytes() const { return options.device == DeviceKind::cuda ? kHeadStart : 0; }

  TensorView noise(DType dtype) {
    const TensorView view = memory.allocate(dtype, {options.max_tokens, config.hidden_size});
    const HostCopy copy(view);
    Random random(7);
    for (int64_t i = 0; i < view.elements(); ++i) {
      const auto value = static_cast<float>(random.uniform() - 0.5);
      if (dtype == DType::f32) {
        copy.view().f32()[i] = value;
      } else {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        static_cast<uint16_t*>(copy.view().raw())[i] = static_cast<uint16_t>(bits >> 16);
      }
    }
    copy.store();
    return view;
  }

  // One forward and backward of the shape; afterwards the stopwatches can be read. `layers_alone`: in the middle stage.
  void run(const MeasuredShape& shape, bool layers_alone) {
    const MicroBatch all = micro_batch(shape);
    if (shape.piece.end == 0) return run(all, layers_alone, 0);
    // A piece finds the keys and values of what comes before it: that runs as the piece before, untimed.
    const MicroBatch before = cut_piece(all, 0, shape.piece.begin);
    Stage& stage = layers_alone ? *middle : *whole;
    const auto rows = [&](TensorView of) { return layers_alone ? of.rows(0, before.size()) : TensorView(); };
    attention.pause(true);
    stage.forward(context.exec(), before, 1, rows(input));
    context.synchronize();
    // Without peaks in the data, masses get smaller from token to token and so do the lists: the piece counts alone.
    selecting.take_observations();
    attention.pause(false);
    run(cut_piece(all, shape.piece.begin, shape.piece.end), layers_alone, 0);
    attention.pause(true);
    stage.backward(context.exec(), before, 1, rows(gradient));
    context.synchronize();
    attention.pause(false);
  }

  void run(const MicroBatch& batch, bool layers_alone, int slot) {
    const Exec& exec = context.exec();
    Stage& stage = layers_alone ? *middle : *whole;
    const auto rows = [&](TensorView of) { return layers_alone ? of.rows(0, batch.size()) : TensorView(); };
    zero_tensor(exec, head_start);
    forward.start(exec);
    stage.forward(exec, batch, slot, rows(input));
    forward.stop(exec);
    backward.start(exec);
    stage.backward(exec, batch, slot, rows(gradient));
    backward.stop(exec);
    context.synchronize();
  }

  MicroBatch micro_batch(const MeasuredShape& shape) const {
    MicroBatch batch;
    Random random(11);
    for (size_t i = 0; i < shape.tokens.size(); ++i) {
      for (int64_t t = 0; t < shape.tokens[i]; ++t) {
        batch.tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
        batch.labels.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
        batch.positions.push_back(static_cast<int32_t>(t));
        batch.weights.push_back(1e-4f);
      }
      batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
      batch.sequence_ids.push_back(static_cast<int64_t>(i));
    }
    for (int l = 0; l < config.layers; ++l)
      for (int64_t budget : shape.budgets) batch.budgets.push_back(static_cast<int32_t>(budget));
    return batch;
  }
};

ProfileEngine::ProfileEngine(const ModelShape& shape, const ProfileEngineOptions& options)
    : implementation_(std::make_unique<Implementation>(shape, options)) {}

ProfileEngine::~ProfileEngine() = default;

MeasuredTimes ProfileEngine::parts(const MeasuredShape& shape, bool head) {
  Implementation& e = *implementation_;
  e.attention.parts = true;
  e.settle(shape);
  // Layers alone.
  e.run(shape, /*layers_alone=*/true);
  TimedAttention::Times spent = e.attention.take();
  const int inner = e.options.layers - 2;
  MeasuredTimes times;
  times.pairs_share = e.learn_of(shape);
  times.linear_forward = (e.forward.take() - spent.spent_forward) / inner;
  times.linear_backward = (e.backward.take() - spent.backward) / inner;
  times.attention_backward = spent.backward / inner;
  // Dense sequences select nothing; their second run is faster than the first because its operands are in the cache.
  const bool sparse = shape.work(e.options.spec).scores > 0;
  times.attention_forward = (spent.forward + (sparse ? 0 : spent.selection)) / inner;
  times.selection = sparse ? spent.selection / inner : 0;
  if (!head) return times;
  // With embedding and loss.
  e.run(shape, /*layers_alone=*/false);
  e.learn_of(shape);
  spent = e.attention.take();
  times.head_forward = std::max(0.0, e.forward.take() - spent.spent_forward - e.options.layers * times.linear_forward);
  times.head_backward = std::max(0.0, e.backward.take() - spent.backward - e.options.layers * times.linear_backward);
  return times;
}

double ProfileEngine::whole(const MeasuredShape& shape) {
  Implementation& e = *implementation_;
  e.attention.parts = false;
  e.settle(shape);
  e.run(shape, /*layers_alone=*/false);
  e.learn_of(shape);
  e.attention.take();
  return e.forward.take() + e.backward.take();
}

double ProfileEngine::transfer(int64_t bytes) const {
  std::vector<char> from(static_cast<size_t>(bytes), 1), to(static_cast<size_t>(bytes));
  const auto begin = std::chrono::steady_clock::now();
  std::memcpy(to.data(), from.data(), from.size());
  const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  SB_CHECK(to.back() == 1);
  return us;
}

double ProfileEngine::reduction(int64_t bytes) {
  std::vector<float> sum(static_cast<size_t>(bytes / 4), 1.0f), more(sum.size(), 2.0f);
  const auto begin = std::chrono::steady_clock::now();
  implementation_->pool.parallel_slices(std::ssize(sum), [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) sum[static_cast<size_t>(i)] += more[static_cast<size_t>(i)];
  });
  const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  SB_CHECK(sum.back() == 3.0f);
  return us;
}

int ProfileEngine::threads() const {
  return implementation_->pool.threads();
}

std::string ProfileEngine::machine() const {
  if (implementation_->options.device == DeviceKind::cuda) return cuda::device_info().name;
  return fmt::format("{}, {} threads", processor_name(), threads());
}

}  // namespace sb
