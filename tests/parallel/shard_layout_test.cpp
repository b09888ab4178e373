#include "parallel/shard_layout.h"

#include <gtest/gtest.h>

#include "parallel/model_layout.h"
#include "parallel/pipeline.h"

namespace sb {
namespace {

ParameterSet four_groups(int shards) {
  ParameterSet parameters;
  for (const int64_t elements : {100, 7, 300, 33}) {
    const std::string name = std::to_string(elements);
    parameters.declare(name, {elements}, {{name, 0, elements}});
    parameters.end_group(shards);
  }
  return parameters;
}

TEST(ParameterGroups, ArePaddedSoThatTheyDivide) {
  for (const int shards : {1, 2, 3, 7}) {
    const ParameterSet parameters = four_groups(shards);
    ASSERT_EQ(parameters.groups().size(), 4u);
    int64_t end = 0;
    for (int i = 0; i < 4; ++i) {
      const ParameterSet::Group& group = parameters.groups()[static_cast<size_t>(i)];
      EXPECT_EQ(group.begin, end);
      EXPECT_EQ((group.end - group.begin) % (16 * shards), 0);
      EXPECT_GE(group.end - group.begin, parameters.parameter(i).elements());
      EXPECT_EQ(parameters.parameter(i).offset, group.begin);
      end = group.end;
    }
    EXPECT_EQ(parameters.flat_elements(), end);
  }
}

// Every element belongs to exactly one shard, at one place.
TEST(ShardLayout, CoversEverythingOnce) {
  for (const int shards : {1, 2, 3, 7}) {
    for (const int64_t bucket_elements : {1, 200, 100000}) {
      for (const int alone : {-1, 0, 3}) {
        const ParameterSet parameters = four_groups(shards);
        const ShardLayout layout(parameters, shards, bucket_elements, alone);
        EXPECT_EQ(layout.shard_elements() * shards, parameters.flat_elements());
        std::vector<int> seen(static_cast<size_t>(parameters.flat_elements()), 0);
        for (int shard = 0; shard < shards; ++shard) {
          int64_t own = 0;
          for (const FlatRange& piece : layout.pieces(shard)) {
            own += piece.size();
            for (int64_t i = piece.begin; i < piece.end; ++i) ++seen[static_cast<size_t>(i)];
          }
          EXPECT_EQ(own, layout.shard_elements());
        }
        for (const int times : seen) ASSERT_EQ(times, 1);

        std::vector<std::vector<int>> places(static_cast<size_t>(shards),
                                             std::vector<int>(static_cast<size_t>(layout.shard_elements()), 0));
        int64_t at = 5;
        for (const ShardLayout::Segment& segment : layout.segments({5, parameters.flat_elements()})) {
          EXPECT_EQ(segment.flat.begin, at);
          at = segment.flat.end;
          for (int64_t i = 0; i < segment.flat.size(); ++i)
            ++places[static_cast<size_t>(segment.shard)][static_cast<size_t>(segment.place + i)];
        }
        EXPECT_EQ(at, parameters.flat_elements());
        int64_t held = 0;
        for (const std::vector<int>& shard : places)
          for (const int times : shard) {
            ASSERT_LE(times, 1);
            held += times;
          }
        EXPECT_EQ(held, parameters.flat_elements() - 5);
      }
    }
  }
}

TEST(ShardLayout, OneShardIsOneRange) {
  const ParameterSet parameters = four_groups(1);
  const ShardLayout layout(parameters, 1, 1);
  EXPECT_EQ(layout.buckets(), 4);
  EXPECT_EQ(layout.pieces(0), (std::vector<FlatRange>{{0, parameters.flat_elements()}}));
}

TEST(ShardLayout, BucketsFillFromTheEndAndOneMayStandAlone) {
  const ParameterSet parameters = four_groups(1);  // 112, 16, 304, 48 elements
  EXPECT_EQ(ShardLayout(parameters, 1, 340).buckets(), 2);
  const ShardLayout alone(parameters, 1, 100000, 3);
  EXPECT_EQ(alone.buckets(), 2);
  EXPECT_EQ(alone.bucket(1), (FlatRange{432, 480}));
  EXPECT_EQ(alone.bucket_of_group(2), 0);
  EXPECT_EQ(alone.pieces(0, 1), (std::vector<FlatRange>{{0, 432}}));
}

TEST(SplitLayers, EvenWithTheRemainderInFront) {
  EXPECT_EQ(split_layers_evenly(7, 3), (std::vector<int>{0, 3, 5, 7}));
  EXPECT_EQ(split_layers_evenly(4, 4), (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_THROW(split_layers_evenly(2, 3), UserError);
}

ModelConfig small_model(bool tied) {
  ModelConfig model;
  model.vocab_size = 37;
  model.hidden_size = 24;
  model.intermediate_size = 40;
  model.layers = 5;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 6;
  model.tie_word_embeddings = tied;
  return model;
}

// However the model is cut, its tensors are the same, each once, in the same order.
TEST(ModelLayout, HasEveryTensorOnce) {
  for (const bool tied : {true, false}) {
    const ModelConfig model = small_model(tied);
    std::vector<std::string> expected;
    const ModelLayout whole(model, {0, 5}, 1);
    for (const auto& tensor : whole.tensors()) expected.push_back(tensor.name);
    for (const int stages : {2, 3, 5}) {
      const ModelLayout layout(model, split_layers_evenly(5, stages), 3);
      std::vector<std::string> names;
      for (const auto& tensor : layout.tensors()) names.push_back(tensor.name);
      EXPECT_EQ(names, expected) << stages;
      EXPECT_EQ(layout.tied_bucket(0) >= 0, tied);
      EXPECT_EQ(layout.tied_bucket(stages - 1) >= 0, tied);
      if (tied) {
        // Equal borders on both ends.
        EXPECT_EQ(layout.shards(0).bucket(layout.tied_bucket(0)).size(),
                  layout.shards(stages - 1).bucket(layout.tied_bucket(stages - 1)).size());
      }
    }
  }
}

// Of a vocabulary that does not divide ranks have different parts: what they have alike lies in the same pieces all the
// same.
TEST(ModelLayout, IsCutAlikeOnTheRanksOfATensorParallelGroup) {
  for (const bool tied : {true, false}) {
    for (const int stages : {1, 2}) {
      for (const int64_t bucket_elements : {1, 1000, 100000}) {
        const ModelLayout layout(small_model(tied), split_layers_evenly(5, stages), 3, bucket_elements, {}, 2);
        for (int stage = 0; stage < stages; ++stage) EXPECT_EQ(layout.shards(stage, 0), layout.shards(stage, 1));
      }
    }
  }
}

}  // namespace
}  // namespace sb
