#include "parallel/gradient_reducer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "comm/thread_communicator.h"
#include "core/errors.h"
#include "core/thread_pool.h"

namespace sb {
namespace {

// Adds the parts of a reduce_scatter from the rank `first` on, round the ring: as a library may do that looks at how
// the ranks of this very group are connected. It does so as late as it may, when somebody waits, and an all_reduce as
// early as it may. Everything else is `ranks`'.
class AddsFrom final : public Communicator {
  class Late final : public CommRequest::State {
   public:
    explicit Late(std::function<void()> work) : work_(std::move(work)) {}
    void wait() override { work_(); }
    bool done() override { return false; }
    void abandon() override {}

   private:
    std::function<void()> work_;
  };

 public:
  // `busy`: whose all_reduce of all that share this is not waited for yet.
  AddsFrom(Communicator& ranks, int first, const AddsFrom** busy = nullptr)
      : ranks_(ranks), first_(first), busy_(busy) {}

  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  const std::string& name() const override { return ranks_.name(); }
  std::chrono::milliseconds timeout() const override { return ranks_.timeout(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    return ranks_.split(color, key, name);
  }
  CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    ranks_.all_reduce_async(data, count, type, op).wait();
    summed_.push_back(count);
    if (busy_ == nullptr) return {};
    EXPECT_TRUE(*busy_ == nullptr || *busy_ == this) << "two groups add at the same time";
    *busy_ = this;
    return CommRequest(std::make_unique<Late>([this] { *busy_ = nullptr; }));
  }
  CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    SB_CHECK(type == CommType::f32 && op == ReduceOp::sum, "another reduction");
    return CommRequest(std::make_unique<Late>([=, this] { add(static_cast<float*>(data), count); }));
  }
  CommRequest all_gather_async(void* data, int64_t count, CommType type) override {
    return ranks_.all_gather_async(data, count, type);
  }
  CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) override {
    return ranks_.broadcast_async(data, count, type, root);
  }
  CommRequest send_async(const void* data, int64_t bytes, int to, int tag) override {
    return ranks_.send_async(data, bytes, to, tag);
  }
  CommRequest receive_async(void* data, int64_t bytes, int from, int tag) override {
    return ranks_.receive_async(data, bytes, from, tag);
  }
  CommRequest barrier_async() override { return ranks_.barrier_async(); }
  void check_usable() const override { ranks_.check_usable(); }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    ranks_.abort(why, exit_code);
    throw CommAborted(why);
  }

  // Elements of every all_reduce so far.
  const std::vector<int64_t>& summed() const { return summed_; }

 private:
  void add(float* values, int64_t count) {
    const int64_t own = size() * count;
    std::vector<float> all(static_cast<size_t>(size() * own));
    std::copy_n(values, own, all.begin() + rank() * own);
    ranks_.all_gather(std::span(all), own);
    for (int64_t i = rank() * count; i < (rank() + 1) * count; ++i) {
      const auto of = [&](int turn) { return all[static_cast<size_t>((first_ + turn) % size() * own + i)]; };
      values[i] = of(0);
      for (int turn = 1; turn < size(); ++turn) values[i] += of(turn);
    }
  }

  Communicator& ranks_;
  const int first_;
  const AddsFrom** busy_;
  std::vector<int64_t> summed_;
};

constexpr int64_t kLong = 70'001;  // elements of what is not added together with others

// Norms that two ranks have alike around a product of which each has a half, and something long.
ParameterSet two_layers(int shards) {
  ParameterSet parameters;
  for (const char* layer : {"0", "1"}) {
    for (const auto& [name, shape] :
         {std::pair<std::string, Shape>{"norm", {37}}, {"half", {5, 11}}, {"bias", {20}}, {"long", {kLong}}})
      parameters.declare(layer + name, shape, {{layer + name, 0, shape[0]}});
    parameters.end_group(shards);
  }
  parameters.allocate(/*with_gradients=*/true);
  return parameters;
}

void reduce_both_layers(GradientReducer& reducer) {
  reducer.start();
  reducer.group_final(1);
  reducer.group_final(0);
  ThreadPool pool(1);
  reducer.finish({.device = DeviceKind::cpu, .pool = &pool});
}

TEST(GradientReducer, GivesWhatRanksHaveAlikeTheSameBits) {
  constexpr int kTensor = 2, kReplicas = 3;
  for (const int64_t bucket_elements : {1, 1000}) {
    run_thread_ranks(kTensor * kReplicas, [&](Communicator& world) {
      const int tensor_rank = world.rank() % kTensor, replica = world.rank() / kTensor;
      const auto tensor = world.split(replica, tensor_rank, "tp"), same = world.split(tensor_rank, replica, "dp");
      AddsFrom sharing(*tensor, 0), replicas(*same, tensor_rank);

      const ParameterSet parameters = two_layers(kReplicas);
      const auto count = static_cast<size_t>(parameters.flat_elements());
      // What every rank computed, which all know.
      std::vector<std::vector<float>> computed(kTensor * kReplicas, std::vector<float>(count));
      for (int rank = 0; rank < kTensor * kReplicas; ++rank) {
        std::mt19937 random(static_cast<unsigned>(rank + 1));
        for (float& value : computed[static_cast<size_t>(rank)]) value = std::normal_distribution<float>()(random);
      }
      float* gradients = parameters.gradients().f32();
      std::copy_n(computed[static_cast<size_t>(world.rank())].begin(), count, gradients);

      const ShardLayout layout(parameters, kReplicas, bucket_elements);
      std::vector<GradientReducer::Shared> shared;
      std::vector<bool> alike(count, false);
      for (int i = 0; i < parameters.count(); ++i) {
        const Parameter& one = parameters.parameter(i);
        if (one.shape.rank() > 1) continue;
        shared.push_back({{one.offset, one.offset + one.elements()}, sharing});
        std::fill_n(alike.begin() + one.offset, one.elements(), true);
      }
      GradientReducer reducer(parameters, layout, replicas, nullptr, -1, shared);
      reduce_both_layers(reducer);
      int64_t short_ones = 0, long_ones = 0;
      for (const FlatRange& piece : layout.pieces(replicas.rank()))
        for (const GradientReducer::Shared& one : shared) {
          const int64_t own = std::min(piece.end, one.range.end) - std::max(piece.begin, one.range.begin);
          if (own <= 0) continue;
          if (one.range.size() == kLong)
            ++long_ones;
          else
            short_ones += own;
        }
      // All short ones at once, first; each of the long ones by itself.
      EXPECT_EQ(std::ssize(sharing.summed()), long_ones + (short_ones > 0));
      EXPECT_TRUE(short_ones == 0 || sharing.summed().front() == short_ones);

      // The own pieces are sums over the replicas or over all ranks, and what the other rank of the group has.
      std::vector<float> both(kTensor * count);
      std::copy_n(gradients, count, both.begin() + tensor_rank * static_cast<int64_t>(count));
      tensor->all_gather(std::span(both), static_cast<int64_t>(count));
      int compared = 0;
      for (const FlatRange& piece : layout.pieces(replicas.rank())) {
        for (auto i = static_cast<size_t>(piece.begin); i < static_cast<size_t>(piece.end); ++i) {
          double expected = 0;
          for (int rank = 0; rank < kTensor * kReplicas; ++rank)
            if (alike[i] || rank % kTensor == tensor_rank) expected += computed[static_cast<size_t>(rank)][i];
          EXPECT_NEAR(gradients[i], expected, 1e-5) << i;
          if (!alike[i]) continue;
          EXPECT_EQ(both[i], both[count + i]) << "element " << i << " of replica " << replica;
          ++compared;
        }
      }
      EXPECT_EQ(world.all_reduce(compared), kTensor * 2 * (37 + 20 + kLong));
    });
  }
}

// A device runs the operations of one group at a time: those of two may wait for each other.
TEST(GradientReducer, AddsOverOneGroupAfterTheOther) {
  run_thread_ranks(2, [](Communicator& world) {
    const auto alone = world.split(world.rank(), 0, "dp"), again = world.split(0, world.rank(), "kv");
    const AddsFrom* busy = nullptr;
    AddsFrom replicas(*alone, 0), tensor(world, 0, &busy), keys(*again, 0, &busy);
    const ParameterSet parameters = two_layers(1);
    std::fill_n(parameters.gradients().f32(), parameters.flat_elements(), 1.0f);
    const ShardLayout layout(parameters, 1, 1000);
    std::vector<GradientReducer::Shared> shared;
    for (int i = 0; i < parameters.count(); ++i) {
      const Parameter& one = parameters.parameter(i);
      if (one.shape.rank() == 1)
        shared.push_back({{one.offset, one.offset + one.elements()}, shared.size() % 2 == 0 ? tensor : keys});
    }
    GradientReducer reducer(parameters, layout, replicas, nullptr, -1, shared);
    reduce_both_layers(reducer);
    for (const GradientReducer::Shared& one : shared) EXPECT_EQ(parameters.gradients().f32()[one.range.begin], 2.0f);
    EXPECT_FALSE(tensor.summed().empty() || keys.summed().empty());
  });
}

}  // namespace
}  // namespace sb
