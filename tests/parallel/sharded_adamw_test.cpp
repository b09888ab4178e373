// AdamW spread over ranks, with the moments' type as an option.
#include "parallel/sharded_adamw.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <vector>

#include "comm/thread_communicator.h"
#include "device/context.h"
#include "device/float16.h"

namespace sb {
namespace {

constexpr int64_t kRows = 12, kColumns = 10;

// What a rank of a tensor-parallel group has: rows, columns, copies.
void declare(ParameterSet& parameters, const TensorShare& share, int shards) {
  const int64_t rows = share.size(kRows), columns = share.size(kColumns);
  parameters.declare("up", {rows, kColumns}, {{"up", 0, rows, share.rows(kRows)}});
  parameters.declare("down", {kRows, columns}, {{"down", 0, kRows, share.columns(kColumns)}});
  parameters.end_group(shards);
  parameters.declare("norm", {7}, {{"norm", 0, 7, share.whole()}});
  parameters.end_group(shards);
  parameters.allocate(true);
}

using Tensors = std::map<std::string, std::vector<float>>;

// First and second moments of the whole tensors after some steps, element by element the same gradients on any grid.
Tensors moments_after_updates(int tp, int shards) {
  Tensors all;
  std::mutex mutex;
  for (int tp_rank = 0; tp_rank < tp; ++tp_rank)
    run_thread_ranks(shards, [&](Communicator& replicas) {
      ThreadPool pool(1);
      const DeviceContext context(DeviceKind::cpu, pool, 0);
      ParameterSet parameters;
      declare(parameters, {tp, tp_rank}, shards);
      for (const FlatTensor& tensor : parameters.flat_tensors())
        tensor.each_run([&](int64_t here, int64_t whole, int64_t count) {
          for (int64_t i = 0; i < count; ++i)
            parameters.gradients().f32()[tensor.begin + here + i] = 0.001f * static_cast<float>(1 + whole + i);
        });
      const ShardLayout layout(parameters, shards, 1);
      ShardedAdamW optimizer(parameters, layout, replicas, {.moments = DType::bf16});
      EXPECT_EQ(optimizer.first_moment().dtype(), DType::bf16);
      for (int64_t step = 1; step <= 5; ++step)
        optimizer.update(context.exec(), {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1.0f});
      std::lock_guard lock(mutex);
      for (const FlatTensor& tensor : parameters.flat_tensors()) {
        std::vector<float>& values = all[tensor.name];
        values.resize(static_cast<size_t>(2 * tensor.elements()), -1.0f);
        tensor.each_run([&](int64_t here, int64_t whole, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            const int64_t flat = tensor.begin + here + i;
            const ShardLayout::Segment segment = layout.segments({flat, flat + 1}).front();
            if (segment.shard != replicas.rank()) continue;
            int64_t to = whole + i;
            for (const TensorView& moment : {optimizer.first_moment(), optimizer.second_moment()}) {
              const float now = f32_from_bf16(static_cast<const uint16_t*>(moment.raw())[segment.place]);
              float& kept = values[static_cast<size_t>(to)];
              EXPECT_TRUE(tensor.cut.copy == 0 || now == kept) << tensor.name << " differs between ranks";
              kept = now;
              to += tensor.elements();
            }
          }
        });
      }
    });
  return all;
}

TEST(ShardedAdamW, AnElementIsRoundedAlikeOnEveryRank) {
  const Tensors alone = moments_after_updates(1, 1);
  ASSERT_EQ(alone.size(), 3u);
  for (const auto& [tp, shards] : {std::pair{1, 2}, {1, 3}, {2, 1}, {5, 1}, {3, 2}})
    EXPECT_EQ(moments_after_updates(tp, shards), alone) << "tp " << tp << ", " << shards << " shards";
  // Tensors have random numbers of their own: the same gradients, other roundings.
  EXPECT_NE(alone.at("up"), alone.at("down"));
}

TEST(ShardedAdamW, PlansTheMomentsOfEitherType) {
  const ShardedAdamW::Storage exact, half{.moments = DType::bf16};
  EXPECT_EQ(ShardedAdamW::bytes(1 << 20, 2, true, exact), 8 << 19);
  EXPECT_EQ(ShardedAdamW::bytes(1 << 20, 2, true, half), 4 << 19);
  EXPECT_EQ(ShardedAdamW::bytes(1 << 20, 2, false, exact), 12 << 19);
  EXPECT_EQ(ShardedAdamW::bytes(1 << 20, 2, false, half), 8 << 19);
  EXPECT_EQ(ShardedAdamW::bytes(1 << 20, 2, false, {true, DType::bf16}), 3 * 8 << 19);
}

}  // namespace
}  // namespace sb
