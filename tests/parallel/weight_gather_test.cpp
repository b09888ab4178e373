// Weights that come bucket by bucket, after the update has returned.
#include "parallel/weight_gather.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "comm/thread_communicator.h"
#include "device/context.h"
#include "parallel/sharded_adamw.h"
#include "tests/parallel/late_gathers.h"

namespace sb {
namespace {

constexpr int kRanks = 3, kGroups = 4;
constexpr int64_t kGatherColumns = 50;

// Of a rank of `kRanks`: a bucket for every group, a matrix and a vector in each.
struct Replica {
  ThreadPool pool{1};
  DeviceContext context{DeviceKind::cpu, pool, 0};
  ParameterSet parameters;
  float* raw = nullptr;  // where the values lie, whether they are there or not
  std::unique_ptr<ShardLayout> layout;
  std::unique_ptr<ShardedAdamW> optimizer;
  int64_t steps = 0;

  explicit Replica(Communicator& replicas) {
    for (int group = 0; group < kGroups; ++group) {
      const std::string name = std::to_string(group);
      parameters.declare("matrix" + name, {group + 1, kGatherColumns},
                         {{"matrix" + name, 0, group + 1, TensorShare{}.whole()}});
      parameters.declare("vector" + name, {5}, {{"vector" + name, 0, 5, TensorShare{}.whole()}});
      parameters.end_group(kRanks);
    }
    parameters.allocate(true);
    raw = parameters.values().f32();
    layout = std::make_unique<ShardLayout>(parameters, kRanks, 1);
    optimizer = std::make_unique<ShardedAdamW>(parameters, *layout, replicas, ShardedAdamW::Storage{});
  }
  void update() {
    ++steps;
    for (int64_t i = 0; i < parameters.flat_elements(); ++i)
      parameters.gradients().f32()[i] = std::sin(static_cast<float>(i * steps));
    optimizer->update(context.exec(), {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, steps, 1.0f});
  }
  // Whether all elements of the bucket are numbers.
  bool here(int bucket) const {
    const FlatRange range = layout->bucket(bucket);
    for (int64_t i = range.begin; i < range.end; ++i)
      if (std::isnan(raw[i])) return false;
    return true;
  }
  std::vector<bool> here() const {
    std::vector<bool> all;
    for (int bucket = 0; bucket < layout->buckets(); ++bucket) all.push_back(here(bucket));
    return all;
  }
  std::vector<float> values() const { return {raw, raw + parameters.flat_elements()}; }
};

void on_replicas(bool at_once, const std::function<void(Replica&, int rank)>& body) {
  run_thread_ranks(kRanks, [&](Communicator& world) {
    LateGathers late(world, at_once);
    Replica replica(late);
    ASSERT_EQ(replica.layout->buckets(), kGroups);
    body(replica, world.rank());
  });
}

TEST(WeightGather, WhoReadsAWeightWaitsForItsBucketAlone) {
  on_replicas(/*at_once=*/false, [](Replica& replica, int) {
    replica.update();
    EXPECT_EQ(replica.here(), (std::vector<bool>{false, false, false, false}));
    replica.parameters.weight(2);  // group 1
    EXPECT_EQ(replica.here(), (std::vector<bool>{false, true, false, false}));
    replica.parameters.value(1);  // group 0
    EXPECT_EQ(replica.here(), (std::vector<bool>{true, true, false, false}));
    EXPECT_EQ(replica.optimizer->take_waits().size(), 2u);
    replica.parameters.weight(3);
    EXPECT_EQ(replica.optimizer->take_waits().size(), 0u) << "group 1 is there";
    replica.parameters.values();
    EXPECT_EQ(replica.here(), (std::vector<bool>{true, true, true, true}));
    EXPECT_EQ(replica.optimizer->take_waits().size(), 2u);
  });
}

TEST(WeightGather, EveryWayToTheValuesWaits) {
  const std::vector<std::function<void(Replica&)>> ways = {[](Replica& replica) { replica.parameters.values(); },
                                                           [](Replica& replica) { replica.parameters.host_values(); },
                                                           [](Replica& replica) { replica.optimizer->await_weights(); },
                                                           [](Replica& replica) {
                                                             for (int i = 0; i < replica.parameters.count(); ++i)
                                                               replica.parameters.weight(i);
                                                           }};
  for (const auto& way : ways)
    on_replicas(/*at_once=*/false, [&](Replica& replica, int) {
      replica.update();
      way(replica);
      EXPECT_EQ(replica.here(), (std::vector<bool>{true, true, true, true}));
    });
}

// Rank by rank the weights after some steps, in which rank 1 reads nothing and the others something.
std::vector<std::vector<float>> values_after_updates(bool at_once) {
  std::vector<std::vector<float>> all(kRanks);
  on_replicas(at_once, [&](Replica& replica, int rank) {
    for (int step = 0; step < 5; ++step) {
      replica.update();
      if (rank != 1) replica.parameters.weight(2 * (step % kGroups));
    }
    replica.optimizer->await_weights();
    all[static_cast<size_t>(rank)] = replica.values();
  });
  return all;
}

TEST(WeightGather, AnUpdateWaitsForWhatNobodyHasRead) {
  const std::vector<std::vector<float>> late = values_after_updates(false);
  EXPECT_EQ(late, values_after_updates(true));
  EXPECT_EQ(late[0], late[1]);
  EXPECT_EQ(late[0], late[2]);
}

}  // namespace
}  // namespace sb
