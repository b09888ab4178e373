#include "parallel/tensor_writers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace sb {
namespace {

using Kind = TensorWriters::Kind;

// The shape of a 7B model: layers of 203M parameters, and a vocabulary on either end.
ModelConfig large_model(bool tied) {
  ModelConfig model;
  model.vocab_size = 32000;
  model.hidden_size = 4096;
  model.intermediate_size = 11008;
  model.layers = 32;
  model.heads = model.kv_heads = 32;
  model.head_dim = 128;
  model.tie_word_embeddings = tied;
  return model;
}

ModelLayout layout_of(const ModelConfig& model, const GridShape& grid, const LoraConfig& lora = {}) {
  std::vector<int> first_layers;
  for (int stage = 0; stage <= grid.pp; ++stage) first_layers.push_back(model.layers * stage / grid.pp);
  return ModelLayout(model, first_layers, grid.dp * grid.cp, ModelLayout::kBucketElements, lora, grid.tp);
}

constexpr GridShape kGrids[] = {{1, 1, 1, 1}, {8, 1, 1, 1}, {1, 8, 1, 1}, {1, 1, 4, 2}, {2, 2, 1, 2}, {2, 2, 2, 2}};

TEST(TensorWriters, EveryTensorHasOneWriterThatHasItsStage) {
  for (const GridShape& grid : kGrids) {
    for (const bool tied : {true, false}) {
      const ModelLayout layout = layout_of(large_model(tied), grid);
      const TensorWriters writers(layout, grid, false);
      std::map<std::pair<std::string, Kind>, int> written;
      size_t most = 0;
      for (int rank = 0; rank < grid.ranks(); ++rank) {
        most = std::max(most, writers.of(rank).size());
        Kind last = Kind::weight;
        for (const auto& [tensor, kind] : writers.of(rank)) {
          ++written[{tensor->name, kind}];
          EXPECT_EQ(tensor->stage, grid_place(grid, rank).stage);
          EXPECT_LE(last, kind);
          last = kind;
        }
      }
      EXPECT_EQ(writers.rounds(), most);
      EXPECT_EQ(written.size(), 3 * layout.tensors().size());
      for (const auto& [item, count] : written) EXPECT_EQ(count, 1) << item.first;
    }
  }
}

// 12 bytes of every parameter, a share of which each rank holds in host memory while it is written.
TEST(TensorWriters, RanksOfAStageHaveAboutAsMuchToWrite) {
  for (const GridShape& grid : kGrids) {
    const ModelLayout layout = layout_of(large_model(false), grid);
    const TensorWriters writers(layout, grid, false);
    std::map<int, std::vector<int64_t>> by_stage;
    int64_t sum = 0, all = 0;
    for (const ModelLayout::Tensor& tensor : layout.tensors()) all += 3 * tensor.parts[0].flat.elements();
    for (int rank = 0; rank < grid.ranks(); ++rank) {
      by_stage[grid_place(grid, rank).stage].push_back(writers.elements(rank));
      sum += writers.elements(rank);
    }
    EXPECT_EQ(sum, all);
    for (const auto& [stage, elements] : by_stage) {
      const auto [least, most] = std::ranges::minmax(elements);
      EXPECT_LT(static_cast<double>(most), 1.05 * static_cast<double>(least)) << stage;
    }
    // Nobody has less than the first rank over 1.2, on whatever stage.
    for (int rank = 1; rank < grid.ranks(); ++rank)
      EXPECT_LE(static_cast<double>(writers.elements(0)), 1.2 * static_cast<double>(writers.elements(rank)));
  }
}

TEST(TensorWriters, FilesAreCountedByTheRanksThatHaveOne) {
  const GridShape grid{2, 2, 1, 2};
  const ModelLayout layout = layout_of(large_model(false), grid);
  const TensorWriters writers(layout, grid, false);
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    EXPECT_EQ(writers.weights_file(rank).number, rank + 1);
    EXPECT_EQ(writers.weights_file(rank).count, 8);
    EXPECT_EQ(writers.moments_file(rank).count, 8);
  }
  // One rank: the single files of Hugging Face and of earlier versions.
  const GridShape one;
  const ModelLayout whole = layout_of(large_model(true), one);
  EXPECT_EQ(TensorWriters(whole, one, false).weights_file(0).count, 1);
}

TEST(TensorWriters, AdaptersAreAllOfTheFirstRankAndTheirMomentsAreNot) {
  LoraConfig lora;
  lora.rank = 16;
  lora.alpha = 16;
  const GridShape grid{2, 2, 1, 2};
  const ModelLayout layout = layout_of(large_model(true), grid, lora);
  const TensorWriters writers(layout, grid, true);
  size_t weights = 0;
  for (const auto& [tensor, kind] : writers.of(0)) weights += kind == Kind::weight ? 1 : 0;
  EXPECT_EQ(weights, layout.tensors().size());
  for (int rank = 1; rank < grid.ranks(); ++rank) {
    EXPECT_EQ(writers.weights_file(rank).number, 0);
    EXPECT_GT(writers.moments_file(rank).number, 0);
    EXPECT_GT(writers.elements(rank), 0);
  }
  EXPECT_EQ(writers.weights_file(0).count, 1);
}

}  // namespace
}  // namespace sb
