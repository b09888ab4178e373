#include "data/tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <map>

#include "core/random.h"

namespace sb {
namespace {

// Merges by the definition: the best-ranked pair, leftmost first, until none is left.
std::vector<int32_t> naive(const std::string& word, const std::map<std::pair<int, int>, std::pair<int, int>>& merges) {
  std::vector<int32_t> ids(word.begin(), word.end());
  while (true) {
    size_t at = ids.size();
    std::pair<int, int> best{INT32_MAX, 0};
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = merges.find({ids[i], ids[i + 1]});
      if (found != merges.end() && found->second.first < best.first) {
        best = found->second;
        at = i;
      }
    }
    if (at == ids.size()) return ids;
    ids[at] = best.second;
    ids.erase(ids.begin() + static_cast<int64_t>(at) + 1);
  }
}

TEST(Bpe, MergesAsDefinedForShortAndLongWords) {
  Random random(3);
  for (int round = 0; round < 20; ++round) {
    BpeModel model(false);
    for (int b = 0; b < 128; ++b) model.add_token(std::string(1, static_cast<char>(b)), b);
    std::map<std::pair<int, int>, std::pair<int, int>> merges;
    std::vector<int> symbols = {'a', 'b', 'c'};
    for (int rank = 0; rank < 40; ++rank) {
      const int left = symbols[random.below(symbols.size())], right = symbols[random.below(symbols.size())];
      model.add_merge(left, right, 200 + rank);
      merges[{left, right}] = {rank, 200 + rank};
      symbols.push_back(200 + rank);
    }
    BpeModel::Scratch scratch;
    for (size_t length : {0, 1, 2, 3, 10, 63, 64, 65, 66, 200, 1000}) {
      std::string word;
      for (size_t i = 0; i < length; ++i) word += static_cast<char>('a' + random.below(3));
      std::vector<int32_t> ids = {-7};
      ASSERT_EQ(model.encode(word, scratch, ids), -1);
      std::vector<int32_t> expected = naive(word, merges);
      expected.insert(expected.begin(), -7);
      ASSERT_EQ(ids, expected) << "length " << length;
    }
  }
}

TEST(Bpe, AMillionEqualLettersAreNoProblem) {
  BpeModel model(false);
  model.add_token("a", 0);
  model.add_merge(0, 0, 1);
  model.add_merge(1, 1, 2);
  BpeModel::Scratch scratch;
  std::vector<int32_t> ids;
  model.encode(std::string(1000003, 'a'), scratch, ids);
  ASSERT_EQ(ids.size(), 250002u);  // 250,000 fours, a two and a one
  EXPECT_EQ(ids[ids.size() - 2], 1);
  EXPECT_EQ(ids.back(), 0);
}

TEST(WordCache, FindsWhatWasInserted) {
  WordCache cache;
  std::vector<int32_t> ids;
  EXPECT_FALSE(cache.find("word", WordCache::hash("word"), ids));
  const int32_t tokens[] = {5, 6, 7};
  cache.insert("word", WordCache::hash("word"), tokens, 3);
  EXPECT_FALSE(cache.find("work", WordCache::hash("word"), ids)) << "equal hash, other bytes";
  EXPECT_TRUE(cache.find("word", WordCache::hash("word"), ids));
  EXPECT_EQ(ids, (std::vector<int32_t>{5, 6, 7}));
}

}  // namespace
}  // namespace sb
