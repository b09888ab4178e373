#include "attention/index/block_index.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

using Rows = std::map<int64_t, std::pair<std::vector<IndexEntry>, std::vector<int32_t>>>;

struct Case {
  BlockIndexShape shape;
  std::vector<int32_t> cu_seqlens;
  std::vector<uint8_t> dense;
};

// Random causal rows for every query block, some left out.
Rows random_rows(const Case& c, uint64_t seed, bool gathered) {
  BlockIndex layout;
  BlockIndexBuilder builder;
  builder.begin(layout, c.shape, c.cu_seqlens, c.dense, 1);
  Random random(seed);
  Rows rows;
  for (int64_t id = 0; id < layout.rows(); ++id) {
    const auto place = layout.place_of(id);
    const int tokens = layout.query_tokens(*place.sequence, place.query_block);
    const int last = place.query_block * c.shape.query_block + tokens - 1;
    if (random.below(8) == 0) continue;
    auto& [entries, columns] = rows[id];
    for (int block = 0; block * c.shape.block <= last; ++block) {
      if (random.below(2) == 0) {
        entries.push_back({static_cast<uint16_t>(block), static_cast<uint8_t>(random.below(tokens))});
      } else if (gathered && random.below(2) == 0) {
        for (int key = block * c.shape.block; key < (block + 1) * c.shape.block && key <= last; ++key) {
          if (random.below(9) == 0) columns.push_back(key);
        }
      }
    }
  }
  return rows;
}

BlockIndex build(const Case& c, const Rows& rows, int threads) {
  BlockIndex index;
  BlockIndexBuilder builder;
  ThreadPool pool(threads);
  builder.begin(index, c.shape, c.cu_seqlens, c.dense, threads);
  std::vector<int64_t> ids;
  for (const auto& [id, row] : rows) ids.push_back(id);
  pool.parallel_for(static_cast<int64_t>(ids.size()), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      builder.set_row(thread, ids[i], rows.at(ids[i]).first, rows.at(ids[i]).second);
    }
  });
  builder.finish(pool);
  return index;
}

const Case kCases[] = {
    {{128, 16, 2}, {0, 700, 701, 701, 1500}, {}}, {{64, 1, 1}, {0, 1, 65, 193}, {}},
    {{256, 128, 3}, {0, 1000, 1256}, {0, 1}},     {{64, 48, 2}, {0, 500, 900}, {1, 1}},
    {{128, 7, 1}, {0, 129, 640}, {1, 0}},
};

TEST(BlockIndex, RowsComeBackAndColumnsAreTheirTranspose) {
  for (const Case& c : kCases) {
    const Rows rows = random_rows(c, 7, true);
    const BlockIndex index = build(c, rows, 2);
    std::map<int64_t, std::vector<std::pair<int, int>>> columns;
    int64_t entries = 0;
    for (const BlockIndex::Sequence& sequence : index.sequences()) {
      for (int head = 0; head < c.shape.list_heads; ++head) {
        for (int i = 0; i < sequence.query_blocks; ++i) {
          const int64_t id = BlockIndex::row_id(sequence, head, i);
          const auto place = index.place_of(id);
          EXPECT_EQ(place.sequence, &sequence);
          EXPECT_EQ(place.list_head, head);
          EXPECT_EQ(place.query_block, i);
          const BlockIndex::Row row = index.row(id);
          const auto expected = rows.find(id);
          ASSERT_EQ(row.blocks.size(), expected == rows.end() ? 0 : expected->second.first.size());
          for (size_t k = 0; k < row.blocks.size(); ++k) {
            EXPECT_EQ((IndexEntry{row.blocks[k], row.first[k]}), expected->second.first[k]);
            columns[BlockIndex::column_id(sequence, head, row.blocks[k])].push_back({i, row.first[k]});
          }
          if (expected != rows.end()) {
            EXPECT_TRUE(std::equal(row.columns.begin(), row.columns.end(), expected->second.second.begin(),
                                   expected->second.second.end()));
          }
          entries += static_cast<int64_t>(row.blocks.size());
        }
      }
    }
    EXPECT_EQ(index.entries(), entries);
    for (int64_t id = 0; id < index.columns(); ++id) {
      std::vector<std::pair<int, int>> column;
      for (const uint32_t entry : index.column(id)) {
        column.push_back({BlockIndex::query_block_of(entry), BlockIndex::first_of(entry)});
      }
      EXPECT_EQ(column, columns[id]) << "column " << id;
    }
  }
}

TEST(BlockIndex, ThreadsDoNotChangeIt) {
  for (const Case& c : kCases) {
    const Rows rows = random_rows(c, 11, true);
    const BlockIndex one = build(c, rows, 1), three = build(c, rows, 3);
    EXPECT_TRUE(one == three);
    for (int64_t id = 0; id < one.columns(); ++id) {
      EXPECT_TRUE(
          std::equal(one.column(id).begin(), one.column(id).end(), three.column(id).begin(), three.column(id).end()));
    }
  }
}

// Which thread brings which row changes from layer to layer; the memory does not grow with it, and rows that lie across
// two pieces of it come back whole.
TEST(BlockIndex, TheBuilderHoldsNoMoreThanTheRowsAskFor) {
  constexpr int kThreads = 3;
  const Case c{{64, 4, 2}, {0, 3000, 9000}, {}};
  const Rows rows = random_rows(c, 3, true);
  int64_t entries = 0, columns = 0;
  for (const auto& [id, row] : rows) {
    entries += std::ssize(row.first);
    columns += std::ssize(row.second);
  }
  const BlockIndex expected = build(c, rows, 1);
  const int64_t planned = BlockIndexBuilder::most_bytes(expected.rows(), entries, columns, kThreads);
  EXPECT_LE(planned, expected.rows() * 32 + 4 * (entries + columns) + 2 * kThreads * 16384);
  EXPECT_GT(entries, 10 * 4096) << "many pieces";
  ThreadPool pool(2);
  BlockIndexBuilder builder;
  for (int round = 0; round < 4; ++round) {
    BlockIndex index;
    builder.begin(index, c.shape, c.cu_seqlens, c.dense, kThreads);
    // All by one thread, by another, and by turns.
    int64_t i = 0;
    for (const auto& [id, row] : rows)
      builder.set_row(round < 3 ? round : static_cast<int>(i++ % kThreads), id, row.first, row.second);
    builder.finish(pool);
    EXPECT_TRUE(index == expected) << round;
    EXPECT_LE(builder.bytes(), planned) << round;
    EXPECT_GE(builder.bytes(), expected.rows() * 32 + 4 * (entries + columns)) << round;
  }
}

TEST(BlockIndex, CountsTokenPairs) {
  for (const Case& c : kCases) {
    const Rows rows = random_rows(c, 13, true);
    const BlockIndex index = build(c, rows, 1);
    int64_t pairs = 0, causal = 0;
    for (const BlockIndex::Sequence& sequence : index.sequences()) {
      for (int head = 0; head < c.shape.list_heads; ++head) {
        for (int query = 0; query < sequence.length; ++query) {
          causal += query + 1;
          if (sequence.dense) {
            pairs += query + 1;
            continue;
          }
          const int tile = query / c.shape.query_block, token = query % c.shape.query_block;
          const auto row = rows.find(BlockIndex::row_id(sequence, head, tile));
          if (row == rows.end()) continue;
          for (int key = 0; key <= query; ++key) {
            for (const IndexEntry& entry : row->second.first) {
              pairs += entry.block == key / c.shape.block && token >= entry.first;
            }
            for (const int column : row->second.second) pairs += column == key;
          }
        }
      }
    }
    EXPECT_EQ(index.token_pairs(), pairs);
    EXPECT_EQ(index.causal_token_pairs(), causal);
  }
}

TEST(BlockIndex, MalformedRowsAreRefused) {
  const std::vector<int32_t> cu_seqlens = {0, 300};
  BlockIndex index;
  BlockIndexBuilder builder;
  const auto begin = [&] { builder.begin(index, {128, 16, 1}, cu_seqlens, {}, 1); };
  const auto set = [&](int64_t row, std::vector<IndexEntry> entries, std::vector<int32_t> columns = {}) {
    builder.set_row(0, row, entries, columns);
  };
  begin();
  EXPECT_THROW(set(0, {{1, 0}}), InternalError);           // in the future
  EXPECT_THROW(set(18, {{1, 0}, {0, 0}}), InternalError);  // descending
  EXPECT_THROW(set(18, {{1, 0}, {1, 0}}), InternalError);  // twice
  EXPECT_THROW(set(18, {{1, 12}}), InternalError);         // the last query block has 12 tokens
  EXPECT_THROW(set(19, {}), InternalError);                // no such row
  EXPECT_THROW(set(18, {{1, 0}}, {130}), InternalError);   // in a selected block too
  EXPECT_THROW(set(18, {}, {5, 5}), InternalError);        // twice
  EXPECT_THROW(set(0, {}, {16}), InternalError);           // in the future
  EXPECT_THROW(builder.set_row(1, 0, {}), InternalError);  // no such thread
  set(18, {{1, 11}}, {5, 127});
  EXPECT_THROW(set(18, {{1, 0}}), InternalError);  // set already
  const std::vector<int32_t> falling = {0, 10, 5};
  EXPECT_THROW(builder.begin(index, {128, 16, 1}, falling, {}, 1), InternalError);
  EXPECT_THROW(builder.begin(index, {100, 16, 1}, cu_seqlens, {}, 1), InternalError);
  EXPECT_THROW(builder.begin(index, {128, 129, 1}, cu_seqlens, {}, 1), InternalError);
}

class BlockIndexFile : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  std::string path_ = (std::filesystem::temp_directory_path() / ("block_index_" + std::to_string(::getpid()))).string();
  ThreadPool pool_{1};
};

TEST_F(BlockIndexFile, ComesBackWhole) {
  for (const Case& c : kCases) {
    const BlockIndex index = build(c, random_rows(c, 3, true), 1);
    index.save(path_);
    BlockIndex read;
    read.load(path_, pool_);
    EXPECT_TRUE(read == index);
    for (int64_t id = 0; id < index.columns(); ++id) {
      EXPECT_TRUE(
          std::equal(index.column(id).begin(), index.column(id).end(), read.column(id).begin(), read.column(id).end()));
    }
  }
}

TEST_F(BlockIndexFile, DamageIsNoticed) {
  const Case& c = kCases[4];
  build(c, random_rows(c, 3, true), 1).save(path_);
  std::ifstream in(path_, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  const auto write = [&](const std::string& bytes) { std::ofstream(path_, std::ios::binary) << bytes; };
  BlockIndex index;
  for (size_t length = 0; length < whole.size(); length += length < 80 ? 1 : 37) {
    write(whole.substr(0, length));
    EXPECT_THROW(index.load(path_, pool_), UserError) << "truncated to " << length;
  }
  for (size_t at = 0; at < whole.size(); at += at < 80 ? 1 : 29) {
    for (const char flip : {'\x01', '\x80'}) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      write(damaged);
      EXPECT_THROW(index.load(path_, pool_), UserError) << "flipped at " << at;
    }
  }
  write(whole + "x");
  EXPECT_THROW(index.load(path_, pool_), UserError);
  EXPECT_THROW(index.load(path_ + ".missing", pool_), UserError);
  EXPECT_THROW(build(c, {}, 1).save("/nonexistent/index"), UserError);
}

}  // namespace
}  // namespace sb
