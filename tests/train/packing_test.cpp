#include "train/packing.h"

#include <gtest/gtest.h>

#include <numeric>

namespace sb {
namespace {

using Packed = std::vector<std::vector<int>>;
using Loss = BatchOptions::Loss;

Packed pack(const std::vector<int64_t>& lengths, int64_t max_sequences, int64_t max_tokens) {
  std::vector<int64_t> ids(lengths.size());
  std::iota(ids.begin(), ids.end(), 100);
  return pack_in_order(lengths, ids, {max_sequences, max_tokens});
}

TEST(Packing, ClosesAtTheNumberOfSequences) {
  EXPECT_EQ(pack({1, 1, 1, 1, 1}, 2, 100), (Packed{{0, 1}, {2, 3}, {4}}));
}

TEST(Packing, ClosesBeforeTheTokenCap) {
  EXPECT_EQ(pack({6, 4, 1, 10, 9, 2}, 10, 10), (Packed{{0, 1}, {2}, {3}, {4}, {5}}));
}

TEST(Packing, NothingGivesNothing) {
  EXPECT_TRUE(pack({}, 2, 10).empty());
}

TEST(Packing, TooLongSequenceIsNamed) {
  try {
    pack({3, 11}, 2, 10);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("sequence 101 has 11 tokens"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("micro_batch_tokens"), std::string::npos);
  }
}

TEST(Packing, EveryPackingHoldsEachSequenceOnceWithinTheLimits) {
  const std::vector<int64_t> lengths = {5, 1, 9, 3, 3, 7, 2, 8, 1, 1, 1, 4};
  for (int64_t sequences = 1; sequences <= 5; ++sequences) {
    for (int64_t tokens = 9; tokens <= 30; tokens += 7) {
      std::vector<int> seen;
      for (const auto& batch : pack(lengths, sequences, tokens)) {
        EXPECT_LE(static_cast<int64_t>(batch.size()), sequences);
        int64_t sum = 0;
        for (const int i : batch) {
          sum += lengths[static_cast<size_t>(i)];
          seen.push_back(i);
        }
        EXPECT_LE(sum, tokens);
      }
      std::vector<int> expected(lengths.size());
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(seen, expected);
    }
  }
}

TEST(PackingLimits, FillsInTheZeros) {
  BatchOptions options;
  options.global_batch_size = 8;
  PackingLimits limits = packing_limits(options, 100);
  EXPECT_EQ(limits.max_sequences, 8);  // as many as fit …
  EXPECT_EQ(limits.max_tokens, 100);   // … into the longest sequence
  options.micro_batch_sequences = 2;
  limits = packing_limits(options, 100);
  EXPECT_EQ(limits.max_sequences, 2);
  EXPECT_EQ(limits.max_tokens, 200);
  options.micro_batch_tokens = 150;
  EXPECT_EQ(packing_limits(options, 100).max_tokens, 150);
  options.micro_batch_tokens = 1'000'000;  // no micro-batch gets that large: no memory for it either
  EXPECT_EQ(packing_limits(options, 100).max_tokens, 200);
}

// Short chats under a large cap: memory is planned for so many sequences, not for a token each.
TEST(PackingLimits, NoMoreSequencesThanMemoryIsPlannedFor) {
  RunConfig config;
  config.batch.global_batch_size = 100'000;
  config.batch.micro_batch_tokens = 65'536;
  for (const auto batching : {BatchingPolicy::in_order, BatchingPolicy::sab})
    for (const int cp : {1, 4})
      for (const int64_t longest : {1, 20, 4096, 65'536}) {
        config.balance.batching = batching;
        config.parallel.cp = cp;
        const PackingLimits limits = packing_limits(config.batch, longest, cp);
        for (const int64_t sequences : {limits.max_sequences, most_sequences(config, limits)}) {
          EXPECT_LE(sequences, limits.max_tokens / cp / 64 + 64) << longest << " tokens, cp " << cp;
          EXPECT_GE(sequences, 64);
        }
      }
  const std::vector<int64_t> lengths(3000, 20);
  const PackingLimits limits = packing_limits(config.batch, 65'536);
  for (const auto& batch : pack_in_order(lengths, lengths, limits)) EXPECT_LE(std::ssize(batch), 1088);
}

TEST(PackingLimits, CapBelowTheLongestSequenceIsRefused) {
  BatchOptions options;
  options.micro_batch_tokens = 99;
  EXPECT_THROW(packing_limits(options, 100), UserError);
}

// By pieces of a given size all micro-batches of a run, by automatic ones those that a step with pieces may have: none
// is then larger than the largest size that is tried.
TEST(SplitBackward, IsForWhatAStepWithPiecesHas) {
  RunConfig config;
  config.parallel.pp = 4;
  constexpr int64_t kWide = 2048;
  EXPECT_EQ(split_backward_tokens(config, kWide, 65'536), 0) << "sequences stay whole";
  config.balance.chunk = 4096;
  EXPECT_EQ(split_backward_tokens(config, kWide, 4096), 4096);
  config.balance.chunk = BalanceOptions::kAutomaticChunk;
  EXPECT_EQ(split_backward_tokens(config, kWide, 65'536), 16'384);
  EXPECT_EQ(split_backward_tokens(config, kWide, 9000), 9000);
  EXPECT_EQ(split_backward_tokens(config, 448, 65'536), 0) << "narrow layers";
  config.parallel.tp = 2;
  EXPECT_EQ(split_backward_tokens(config, kWide, 65'536), 0);
  config.parallel.tp = config.parallel.pp = 1;
  EXPECT_EQ(split_backward_tokens(config, kWide, 65'536), 0);
}

TEST(TargetWeights, TokenMeanCountsEveryTargetEqually) {
  const std::vector<int64_t> targets = {3, 0, 5};
  const auto weights = target_weights(Loss::token_mean, targets);
  EXPECT_FLOAT_EQ(weights[0], 1.0f / 8);
  EXPECT_EQ(weights[1], 0.0f);
  EXPECT_FLOAT_EQ(weights[2], 1.0f / 8);
}

TEST(TargetWeights, SequenceMeanCountsEverySequenceWithTargetsEqually) {
  const std::vector<int64_t> targets = {4, 0, 10};
  const auto weights = target_weights(Loss::sequence_mean, targets);
  EXPECT_FLOAT_EQ(weights[0], 1.0f / (2 * 4));
  EXPECT_EQ(weights[1], 0.0f);
  EXPECT_FLOAT_EQ(weights[2], 1.0f / (2 * 10));
  EXPECT_NEAR(weights[0] * 4 + weights[2] * 10, 1.0, 1e-6);
}

TEST(TargetWeights, NoTargetsAnywhereGiveZeros) {
  for (const Loss loss : {Loss::token_mean, Loss::sequence_mean})
    EXPECT_EQ(target_weights(loss, std::vector<int64_t>{0, 0}), (std::vector<float>{0, 0}));
}

TEST(MicroBatch, LaysSequencesBackToBack) {
  const std::vector<TokenSequence> sequences = {
      {7, {1, 2, 3}, {2, 3, kIgnoredLabel}}, {8, {4}, {kIgnoredLabel}}, {9, {5, 6}, {kIgnoredLabel, kIgnoredLabel}}};
  const std::vector<int> chosen = {2, 0};
  const std::vector<float> weights = {0.5f, 0.25f, 0.125f};
  const MicroBatch batch = make_micro_batch(sequences, chosen, weights, 10);
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{5, 6, 1, 2, 3}));
  EXPECT_EQ(batch.positions, (std::vector<int32_t>{0, 1, 0, 1, 2}));
  EXPECT_EQ(batch.labels, (std::vector<int32_t>{-100, -100, 2, 3, -100}));
  EXPECT_EQ(batch.weights, (std::vector<float>{0, 0, 0.5f, 0.5f, 0}));
  EXPECT_EQ(batch.cu_seqlens, (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(batch.sequence_ids, (std::vector<int64_t>{9, 7}));
}

TEST(MicroBatch, TokensOutsideTheVocabularyAreNamed) {
  const std::vector<int> chosen = {0};
  const std::vector<float> weights = {1.0f};
  for (const TokenSequence& bad :
       {TokenSequence{42, {1, 10}, {1, kIgnoredLabel}}, TokenSequence{42, {1, -1}, {1, kIgnoredLabel}},
        TokenSequence{42, {1, 2}, {10, kIgnoredLabel}}, TokenSequence{42, {1, 2}, {-1, kIgnoredLabel}}}) {
    try {
      make_micro_batch(std::vector<TokenSequence>{bad}, chosen, weights, 10);
      FAIL();
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find("sequence 42"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace sb
