#include "data/files/token_dataset.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/errors.h"
#include "data/files/token_writer.h"
#include "data/permutation.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

using Document = std::vector<int32_t>;

TEST(IndexPermutation, IsAPermutationForEveryCount) {
  for (uint64_t count : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 100, 1000, 4097}) {
    for (uint64_t stream : {0, 1}) {
      const IndexPermutation permutation(count, 42, stream);
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < count; ++i) {
        const uint64_t at = permutation.at(i);
        ASSERT_LT(at, count);
        ASSERT_TRUE(seen.insert(at).second) << count << " " << i;
      }
    }
  }
  const IndexPermutation huge(uint64_t{1} << 50, 1, 2);
  EXPECT_LT(huge.at((uint64_t{1} << 50) - 1), uint64_t{1} << 50);
}

// Every value is about equally often at every place, and neighbours do not stay neighbours.
TEST(IndexPermutation, LooksRandom) {
  const uint64_t count = 10;
  std::map<std::pair<uint64_t, uint64_t>, int> places;
  int neighbours = 0;
  for (uint64_t stream = 0; stream < 4000; ++stream) {
    const IndexPermutation permutation(count, 7, stream);
    for (uint64_t i = 0; i < count; ++i) {
      ++places[{i, permutation.at(i)}];
      if (i > 0) neighbours += permutation.at(i) == permutation.at(i - 1) + 1;
    }
  }
  for (const auto& [place, times] : places) EXPECT_NEAR(times, 400, 5 * 19) << place.first << " " << place.second;
  EXPECT_EQ(places.size(), 100u);
  EXPECT_NEAR(neighbours, 4000 * 9 * 0.1, 300);
}

// Documents of lengths 1 .. n; token t of document d is 1000 d + t.
void write_lengths(const std::string& prefix, const std::vector<int>& lengths, int base = 0) {
  TokenWriter writer(prefix, {});
  for (size_t d = 0; d < lengths.size(); ++d) {
    Document tokens(static_cast<size_t>(lengths[d]));
    for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = base + static_cast<int32_t>(1000 * d + t);
    writer.add(tokens);
  }
  writer.finish();
}

TokenDatasetOptions dataset_options(std::vector<std::string> paths, int64_t max_length) {
  TokenDatasetOptions options;
  options.paths = std::move(paths);
  options.max_sequence_length = max_length;
  return options;
}

TEST(TokenDataset, SplitsLongDocumentsIntoConsecutivePieces) {
  TemporaryFolder folder;
  write_lengths(folder.path("a"), {4, 1, 9, 10, 8, 2});
  TokenDatasetOptions options = dataset_options({folder.path("a")}, 4);
  options.shuffle = false;
  const TokenDataset data(options, 1);
  // 4 | (1 dropped) | 4 4 (the last token alone is dropped) | 4 4 2 | 4 4 | 2
  const std::vector<std::pair<int, int>> expected = {{0, 4},    {2000, 4}, {2004, 4}, {3000, 4}, {3004, 4},
                                                     {3008, 2}, {4000, 4}, {4004, 4}, {5000, 2}};
  ASSERT_EQ(data.size(), expected.size());
  EXPECT_EQ(data.max_length(), 4);
  for (uint64_t p = 0; p < 2 * data.size(); ++p) {  // two epochs, the same without shuffling
    const auto [first, count] = expected[p % expected.size()];
    const TokenSequence s = data.read(p);
    ASSERT_EQ(data.length(p), count);
    ASSERT_EQ(static_cast<int>(s.tokens.size()), count);
    EXPECT_EQ(data.valid_targets(p), count - 1);
    EXPECT_EQ(s.id, static_cast<int64_t>(p % expected.size()));
    for (int t = 0; t < count; ++t) {
      EXPECT_EQ(s.tokens[static_cast<size_t>(t)], first + t);
      EXPECT_EQ(s.labels[static_cast<size_t>(t)], t + 1 < count ? first + t + 1 : kIgnoredLabel);
    }
  }
  const TokenDataset::Summary& summary = data.summary();
  EXPECT_EQ(summary.documents, 6);
  EXPECT_EQ(summary.tokens, 4 + 8 + 10 + 8 + 2);
  EXPECT_EQ(summary.split_documents, 3);
  EXPECT_EQ(summary.dropped_short, 1);
  EXPECT_EQ(summary.dropped_long, 0);
}

TEST(TokenDataset, DropsLongDocumentsWhenTold) {
  TemporaryFolder folder;
  write_lengths(folder.path("a"), {4, 5, 3});
  TokenDatasetOptions options = dataset_options({folder.path("a")}, 4);
  options.shuffle = false;
  options.overlong = Overlong::drop;
  const TokenDataset data(options, 1);
  EXPECT_EQ(data.size(), 2u);
  EXPECT_EQ(data.length(0), 4);
  EXPECT_EQ(data.length(1), 3);
  EXPECT_EQ(data.summary().dropped_long, 1);
  options.max_sequence_length = 2;
  EXPECT_THROW(TokenDataset(options, 1), UserError) << "nothing left";
}

TEST(TokenDataset, EveryEpochVisitsEverySequenceOnceInAnotherOrder) {
  TemporaryFolder folder;
  std::vector<int> lengths;
  for (int d = 0; d < 700; ++d) lengths.push_back(2 + d % 23);  // several groups of the index
  write_lengths(folder.path("a"), lengths);
  write_lengths(folder.path("b"), {5, 6, 7, 30}, 900000);
  const TokenDatasetOptions options = dataset_options({folder.path("a"), folder.path("b")}, 20);
  const TokenDataset data(options, 3), same(options, 3), other(options, 4);
  std::vector<int64_t> orders[2];
  int differs = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::set<int64_t> ids;
    std::set<int32_t> first_tokens;
    for (uint64_t p = 0; p < data.size(); ++p) {
      const TokenSequence s = data.read(data.size() * static_cast<uint64_t>(epoch) + p);
      ids.insert(s.id);
      first_tokens.insert(s.tokens[0]);
      orders[epoch].push_back(s.id);
      if (epoch == 0) {
        EXPECT_EQ(same.read(p).tokens, s.tokens);
        differs += other.read(p).id != s.id;
      }
    }
    EXPECT_EQ(ids.size(), data.size());
    EXPECT_EQ(first_tokens.size(), data.size());
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_GT(differs, static_cast<int>(data.size()) * 9 / 10);
}

TEST(TokenDataset, WeightsSetTheShares) {
  TemporaryFolder folder;
  write_lengths(folder.path("a"), std::vector<int>(10, 3));
  write_lengths(folder.path("b"), std::vector<int>(100, 3), 500000);
  TokenDatasetOptions options = dataset_options({folder.path("a"), folder.path("b")}, 8);
  options.weights = {3.0, 1.0};
  const TokenDataset data(options, 1);
  int from_a = 0;
  std::map<int64_t, int> visits;
  for (uint64_t p = 0; p < 65536; ++p) {
    const TokenSequence s = data.read(p);
    from_a += s.tokens[0] < 500000;
    ++visits[s.id];
  }
  EXPECT_EQ(from_a, 49152);  // exactly three quarters of a whole cycle
  // Every sequence of a file is visited equally often, give or take one.
  for (int64_t id = 0; id < 10; ++id) EXPECT_NEAR(visits[id], 4915, 1);
  for (int64_t id = 10; id < 110; ++id) EXPECT_NEAR(visits[id], 164, 1);
  // And the files are mixed finely.
  int first_thousand = 0;
  for (uint64_t p = 0; p < 1000; ++p) first_thousand += data.read(p).tokens[0] < 500000;
  EXPECT_NEAR(first_thousand, 750, 70);

  options.weights = {1.0};
  EXPECT_THROW(TokenDataset(options, 1), UserError);
  options.weights = {1.0, 0.0};
  EXPECT_THROW(TokenDataset(options, 1), UserError);
  options.weights = {1.0, 1e-9};
  EXPECT_THROW(TokenDataset(options, 1), UserError);
  options.weights = {1.0, 1.0};
  options.shuffle = false;
  EXPECT_THROW(TokenDataset(options, 1), UserError);
}

// 40 sequences of 6 tokens and 5 of 30: equal shares of the tokens are five sequences of the first to one of the
// second.
TEST(TokenDataset, WeightsMayBeSharesOfTheTokens) {
  TemporaryFolder folder;
  write_lengths(folder.path("a"), std::vector<int>(40, 6));
  write_lengths(folder.path("b"), std::vector<int>(5, 30), 500000);
  TokenDatasetOptions options = dataset_options({folder.path("a"), folder.path("b")}, 64);
  const auto token_share = [&](const std::vector<double>& weights) {
    options.weigh = TokenDatasetOptions::Weigh::tokens;
    options.weights = weights;
    const TokenDataset data(options, 1), again(options, 1);
    std::map<bool, double> tokens;
    for (uint64_t p = 0; p < 65536; ++p) tokens[data.read(p).tokens[0] < 500000] += static_cast<double>(data.length(p));
    for (const uint64_t p : {uint64_t{7}, uint64_t{70000}, uint64_t{1} << 40})  // a function of the position alone
      EXPECT_EQ(again.read(p).tokens, data.read(p).tokens);
    const double share = tokens[true] / (tokens[true] + tokens[false]);
    EXPECT_NEAR(data.shares()[0].tokens, share, 1e-12);
    EXPECT_NEAR(data.shares()[0].tokens + data.shares()[1].tokens, 1, 1e-12);
    return share;
  };
  EXPECT_NEAR(token_share({1, 1}), 0.5, 1e-4);
  EXPECT_NEAR(token_share({3, 1}), 0.75, 1e-4);
  options.weigh = TokenDatasetOptions::Weigh::visits;
  options.weights = {1, 2};
  const std::vector<TokenDataset::Share> shares = TokenDataset(options, 1).shares();
  EXPECT_NEAR(shares[0].sequences, 0.8, 1e-4);         // 40 once, 5 twice
  EXPECT_NEAR(shares[0].tokens, 240.0 / 540.0, 1e-4);  // 240 tokens once, 150 twice
  EXPECT_EQ(shares[1].path, folder.path("b"));
}

TEST(TokenDataset, MasksReachTheLabels) {
  TemporaryFolder folder;
  {
    TokenWriter writer(folder.path("a"), {});
    writer.add(Document{10, 11, 12, 13, 14, 15}, std::vector<uint8_t>{1, 0, 1, 0, 1, 1});
    writer.finish();
  }
  TokenDatasetOptions options = dataset_options({folder.path("a")}, 6);
  const TokenSequence whole = TokenDataset(options, 1).read(0);
  EXPECT_EQ(whole.labels, (Document{-100, 12, -100, 14, 15, -100}));
  EXPECT_EQ(TokenDataset(options, 1).valid_targets(0), 3);
  options.max_sequence_length = 4;
  options.shuffle = false;
  const TokenDataset split(options, 1);
  EXPECT_EQ(split.read(0).labels, (Document{-100, 12, -100, -100}));
  EXPECT_EQ(split.read(1).labels, (Document{15, -100}));
  EXPECT_EQ(split.valid_targets(0), 1);
  EXPECT_EQ(split.valid_targets(1), 1);
  // A count that disagrees with the bits.
  std::string mask = read_bytes(folder.path("a.mask"));
  mask[32] = 2;
  write_bytes(folder.path("a.mask"), mask);
  options.max_sequence_length = 6;
  const TokenDataset damaged(options, 1);
  EXPECT_NE(user_error([&] { damaged.read(0); }).find("should have 2 targets but has 3"), std::string::npos);
}

TEST(TokenDataset, IdsOutsideTheVocabulary) {
  TemporaryFolder folder;
  write_lengths(folder.path("a"), {3, 3});
  TokenDatasetOptions options = dataset_options({folder.path("a")}, 8);
  options.shuffle = false;
  options.vocab_size = 1002;
  const TokenDataset data(options, 1);
  EXPECT_NO_THROW(data.read(0));
  const std::string error = user_error([&] { data.read(1); });
  EXPECT_NE(error.find("token 2 of document 1 is 1002, outside the vocabulary of 1002"), std::string::npos) << error;
  EXPECT_THROW(TokenDataset(dataset_options({}, 8), 1), UserError);
  EXPECT_THROW(TokenDataset(dataset_options({folder.path("a")}, 1), 1), UserError);
}

}  // namespace
}  // namespace sb
