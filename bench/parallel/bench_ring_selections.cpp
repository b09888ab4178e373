// Trains a model on one rank and on ranks that share its sequences, side by side, and compares what they select:
//   bench_ring_selections MODEL [STEPS [CP [TOKENS [BUDGET]]]]
// MODEL is a Hugging Face directory; chunk recall, topk, blocks of 64. Selecting is discontinuous, so that the last bit
// of a score may decide: every query block that selected otherwise is shown with the masses of the blocks that changed
// places. The ranks then go on with what one rank selected, so that the losses show whether anything else differs.

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "attention/cpu/sparse_attention.h"
#include "attention/forwarding_attention.h"
#include "attention/select/block_scores.h"
#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "core/errors.h"
#include "core/labels.h"
#include "data/synthetic/synthetic.h"
#include "model/hf_checkpoint.h"
#include "parallel/ring/context_batch.h"
#include "parallel/ring/ring_attention.h"
#include "train/packing.h"
#include "train/rank_model.h"

namespace {

using namespace sb;

// What one rank did in one call of attention.
struct Call {
  AttentionShape shape{};
  std::vector<float> q, k;
  BlockIndex index;
};

class KeepingAttention final : public ForwardingAttention {
 public:
  using ForwardingAttention::ForwardingAttention;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    if (replay) return;
    Call& call = calls.emplace_back();
    call.shape = shape;
    call.q.assign(operands.q.f32(), operands.q.f32() + operands.q.elements());
    call.k.assign(operands.k.f32(), operands.k.f32() + operands.k.elements());
    call.index = SparseAttention::index(state);
  }
  std::vector<Call> calls;  // of this step
};

struct Found {
  int64_t rows = 0, other = 0;
  double margin = 0;  // the largest difference of log masses that decided otherwise
};

// Selects, looks what one rank selected, and uses that.
class FollowingAttention final : public ForwardingAttention {
 public:
  FollowingAttention(RingAttention& ring, const KeepingAttention& one, const SelectionConfig& config, int rank)
      : ForwardingAttention(ring), ring_(ring), one_(one), config_(config), rank_(rank) {}

  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    if (replay) return;
    const Call& call = one_.calls.at(next_call++);
    compare(exec, layer, call, ring_.layout(sequences.whole_cu_seqlens), RingAttention::index(state));
    RingAttention::index(state) = call.index;
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, /*replay=*/true);
  }

  size_t next_call = 0;
  int64_t step = 0;
  Found found;

 private:
  void compare(const Exec& exec, int layer, const Call& call, const ContextLayout& layout, const BlockIndex& own) {
    for (int s = 0; s < layout.sequences(); ++s) {
      const BlockIndex::Sequence& place = call.index.sequences()[s];
      if (place.dense) continue;
      const SequenceTiles tiles = sequence_tiles(config_, place.length, config_.budget);
      for (const int32_t b : layout.held(rank_, s))
        for (int head = 0; head < call.shape.kv_heads; ++head)
          for (int64_t tile = int64_t{b} * config_.block / config_.query_block;
               tile < tiles.tiles() && tiles.begin(tile) < int64_t{b + 1} * config_.block; ++tile) {
            const int64_t row = BlockIndex::row_id(place, head, static_cast<int>(tile));
            ++found.rows;
            compare_row(exec, layer, call, s, head, tile, call.index.row(row), own.row(row));
          }
    }
  }

  // The first token that selected otherwise, and what it weighed.
  void compare_row(const Exec& exec, int layer, const Call& call, int s, int head, int64_t tile,
                   const BlockIndex::Row& one, const BlockIndex::Row& other) {
    if (std::ranges::equal(one.blocks, other.blocks) && std::ranges::equal(one.first, other.first)) return;
    ++found.other;
    const BlockIndex::Sequence& place = call.index.sequences()[s];
    const SequenceTiles tiles = sequence_tiles(config_, place.length, config_.budget);
    constexpr int kNever = 255;
    std::vector<int> by_one(tiles.blocks(), kNever), by_other(by_one);
    for (size_t i = 0; i < one.blocks.size(); ++i) by_one[one.blocks[i]] = one.first[i];
    for (size_t i = 0; i < other.blocks.size(); ++i) by_other[other.blocks[i]] = other.first[i];
    int first = kNever;
    for (int64_t j = 0; j < tiles.blocks(); ++j)
      if (by_one[j] != by_other[j]) first = std::min({first, by_one[j], by_other[j]});
    const int64_t token = tiles.begin(tile) + first, competing = tiles.competing(tile);
    const BlockScoring scoring(config_);
    std::vector<float> statistics(BlockStatistics::floats(scoring, call.shape, tiles.blocks()));
    const int64_t begin = place.token_begin;
    BlockStatistics::fill(exec, call.shape, scoring, call.k.data() + begin * call.shape.kv_heads * call.shape.head_dim,
                          place.length, statistics.data());
    BlockScorer scorer(call.shape, scoring, call.q.data() + begin * call.shape.heads * call.shape.head_dim,
                       statistics.data(), tiles.blocks());
    const float* masses = scorer.token_masses(head, token, token + 1, competing);
    std::string text;
    double low = 0, high = 0;
    for (int64_t j = 0; j < competing; ++j)
      if ((by_one[j] == first) != (by_other[j] == first)) {
        text += fmt::format(" {}{} {:.7g}", by_one[j] == first ? "one rank: block " : "shared: block ", j, masses[j]);
        low = high == 0 ? masses[j] : std::min<double>(low, masses[j]);
        high = high == 0 ? masses[j] : std::max<double>(high, masses[j]);
      }
    found.margin = std::max(found.margin, high - low);
    fmt::print("step {} layer {} sequence {} head {} query block {}: token {} selected by log mass:{} (apart {:.1e})\n",
               step, layer, s, head, tile, token, text, high - low);
  }

  RingAttention& ring_;
  const KeepingAttention& one_;
  const SelectionConfig config_;
  const int rank_;
};

struct Task {
  ModelConfig model;
  std::filesystem::path folder;
  SelectionConfig selection;
  int64_t tokens = 0;
  int cp = 1;

  RankModelOptions options(int ranks) const {
    RankModelOptions options;
    options.model = model;
    options.first_layers = {0, model.layers};
    options.grid = {1, 1, ranks};
    options.recompute = Recompute::none;
    options.max_sequence_length = tokens;
    options.max_micro_batch_tokens = ContextLayout::most_tokens(ranks, selection.block, tokens, 1);
    return options;
  }
};

double train_step(RankModel& model, const Exec& exec, std::span<const MicroBatch> batches, int64_t step) {
  const Pipeline::Result result = model.forward_backward(exec, batches, {});
  const double norm = model.reduce(exec);
  const float rate = 5e-4f * std::min(1.0f, static_cast<float>(step) / 5);
  const float clip = norm > 1 ? static_cast<float>(1 / (norm + 1e-6)) : 1.0f;
  model.update(exec, {rate, 0.9f, 0.99f, 1e-8f, 0.1f, step, clip});
  return result.loss.weighted;
}

void run(const Task& task, int64_t steps) {
  constexpr int kSequences = 4;  // of a step, each a micro-batch
  SyntheticOptions synthetic;
  synthetic.vocab_size = task.model.vocab_size;
  synthetic.length = LengthDistribution::fixed(task.tokens);
  const auto source = make_synthetic_source(synthetic, /*seed=*/1);

  SparseAttention sparse({task.selection, task.model.layers, 0});
  KeepingAttention one(sparse);
  const auto alone = make_self_communicator();
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  RankModel model(task.options(1), one, *alone);
  read_hf_weights(task.folder, model.stage().parameters());

  double largest = 0;
  std::vector<Found> found(task.cp);
  std::vector<MicroBatch> batches(kSequences);
  double expected = 0;
  run_thread_ranks(task.cp, [&](Communicator& world) {
    ThreadPool own_pool(1);
    Exec own_exec;
    own_exec.pool = &own_pool;
    const auto group = world.split(0, world.rank(), "cp");
    RingAttention ring(*group, {task.selection, task.model.layers});
    FollowingAttention following(ring, one, task.selection, world.rank());
    RankModel shared(task.options(task.cp), following, world);
    read_hf_weights(task.folder, shared.stage().parameters());
    for (int64_t step = 1; step <= steps; ++step) {
      if (world.rank() == 0) {
        std::vector<TokenSequence> sequences;
        int64_t targets = 0;
        for (int i = 0; i < kSequences; ++i) {
          sequences.push_back(source->read(static_cast<uint64_t>((step - 1) * kSequences + i)));
          for (const int32_t label : sequences.back().labels) targets += label != kIgnoredLabel;
        }
        for (int i = 0; i < kSequences; ++i) {
          const std::array selected{0};
          const std::array weight{1.0f / static_cast<float>(targets)};
          batches[i] = make_micro_batch({&sequences[i], 1}, selected, weight, task.model.vocab_size);
        }
        one.calls.clear();
        expected = train_step(model, exec, batches, step);
      }
      world.barrier();
      std::vector<MicroBatch> parts;
      for (const MicroBatch& batch : batches)
        parts.push_back(context_part(batch, ring.layout(batch.cu_seqlens), world.rank()));
      following.next_call = 0;
      following.step = step;
      const double loss = world.all_reduce(train_step(shared, own_exec, parts, step));
      if (world.rank() == 0) {
        largest = std::max(largest, std::abs(loss / expected - 1));
        if (step == 1 || step % 10 == 0)
          fmt::print("step {}: loss {:.7f}, shared {:.7f}, largest relative difference so far {:.1e}\n", step, expected,
                     loss, largest);
        std::fflush(stdout);
      }
      world.barrier();
    }
    found[world.rank()] = following.found;
  });
  Found all;
  for (const Found& one_rank : found) {
    all.rows += one_rank.rows;
    all.other += one_rank.other;
    all.margin = std::max(all.margin, one_rank.margin);
  }
  fmt::print(
      "{} steps, cp {}: {} of {} lists selected otherwise, by log masses at most {:.1e} apart; with one rank's lists "
      "the losses differ by at most {:.1e} of themselves\n",
      steps, task.cp, all.other, all.rows, all.margin, largest);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: bench_ring_selections MODEL [STEPS [CP [TOKENS [BUDGET]]]]\n");
    return 2;
  }
  const auto number = [&](int i, int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  try {
    Task task;
    task.folder = argv[1];
    task.model = read_model_config(task.folder / "config.json");
    task.cp = static_cast<int>(number(3, 2));
    task.tokens = number(4, 4096);
    task.selection.budget = number(5, 1024);
    task.selection.block = 64;
    task.selection.dense_below = 512;
    run(task, number(2, 60));
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
