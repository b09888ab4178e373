#include "tests/attention/sparse_cases.h"

#include <cmath>
#include <utility>

namespace sb {

AttentionShape shape_of(int heads, int kv_heads, int head_dim) {
  return {heads, kv_heads, head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim))};
}

BlockIndex build_index(const AttentionCase& c, const BlockIndexShape& shape, const RowMaker& maker,
                       std::vector<uint8_t> dense) {
  BlockIndex index;
  BlockIndexBuilder builder;
  ThreadPool pool(1);
  Random random(17);
  builder.begin(index, shape, c.cu_seqlens, dense, 1);
  for (int64_t id = 0; id < index.rows(); ++id) {
    const auto place = index.place_of(id);
    const int tokens = index.query_tokens(*place.sequence, place.query_block);
    const int last = place.query_block * shape.query_block + tokens - 1;
    std::vector<IndexEntry> entries;
    std::vector<int32_t> columns;
    for (int block = 0; block * shape.block <= last; ++block) {
      const int first = maker.first(random, place.query_block, tokens, block, last / shape.block);
      if (first >= 0) {
        entries.push_back({static_cast<uint16_t>(block), static_cast<uint8_t>(first)});
      } else {
        for (int key = block * shape.block; key < (block + 1) * shape.block && key <= last; ++key) {
          if (maker.gathered(random, key)) columns.push_back(key);
        }
      }
    }
    builder.set_row(0, id, entries, columns);
  }
  builder.finish(pool);
  return index;
}

extern const RowMaker kRandomRows = {[](Random& random, int, int tokens, int block, int own) {
  if (block == own) return 0;
  return random.below(2) == 0 ? -1 : static_cast<int>(random.below(tokens));
}};
// Nothing is certain: rows, tokens and keys without a partner.
static const RowMaker kSparseRows = {[](Random& random, int, int tokens, int, int) {
  return random.below(4) != 0 ? -1 : static_cast<int>(random.below(tokens));
}};
static const RowMaker kDiagonalRows = {[](Random&, int, int, int block, int own) { return block == own ? 0 : -1; }};
extern const RowMaker kFullRows = {[](Random&, int, int, int, int) { return 0; }};
// Everybody looks at block 0, and hardly at anything else.
static const RowMaker kHubRows = {[](Random& random, int, int, int block, int own) {
  return block == 0 || block == own || random.below(12) == 0 ? 0 : -1;
}};
extern const RowMaker kNoRows = {[](Random&, int, int, int, int) { return -1; }};
static const RowMaker kGatheredRows = {
    [](Random& random, int, int, int block, int own) { return block == own || random.below(3) == 0 ? 0 : -1; },
    [](Random& random, int) { return random.below(7) == 0; }};
static const RowMaker kOnlyColumns = {[](Random&, int, int, int, int) { return -1; },
                                      [](Random& random, int key) { return key % 5 == 2 || random.below(40) == 0; }};

const std::vector<SparseCase>& sparse_cases() {
  static const std::vector<SparseCase> all = [] {
    std::vector<SparseCase> cases;
    const auto add = [&](const std::string& group, const std::string& what, const AttentionShape& shape,
                         const std::vector<int32_t>& lengths, uint64_t seed, const BlockIndexShape& lists,
                         const RowMaker& maker, const std::vector<uint8_t>& dense = {}) {
      cases.push_back({group + ": " + what, shape, lengths, seed, lists, maker, dense});
    };
    for (const int length : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 383, 385, 513}) {
      add("lengths", std::to_string(length), shape_of(2, 1, 64), {length}, length, {128, 16, 1}, kRandomRows);
      add("lengths", std::to_string(length) + " sparse", shape_of(2, 1, 64), {length}, length, {64, 16, 1},
          kSparseRows);
    }
    for (const int length : {640, 767, 1000}) {
      add("long", std::to_string(length), shape_of(4, 2, 16), {length}, length, {128, 16, 2}, kRandomRows);
      add("long", std::to_string(length) + " sparse", shape_of(4, 2, 16), {length}, length, {64, 32, 4}, kSparseRows);
    }
    for (const int block : {64, 128, 256})
      for (const int query_block : {1, 2, 7, 16, 48, 64, 100, 128})
        add("blocks", std::to_string(block) + " keys, " + std::to_string(query_block) + " queries", shape_of(4, 2, 16),
            {300, 77, 515}, 3, {block, query_block, 2}, kRandomRows);
    for (const int query_block : {1, 16, 128}) {
      const std::string what = std::to_string(query_block) + " queries";
      add("per query head", what, shape_of(6, 2, 32), {300, 130}, 4, {128, query_block, 6}, kRandomRows);
      add("per query head", what + " gathered", shape_of(6, 2, 32), {300, 130}, 4, {64, query_block, 6}, kGatheredRows);
    }
    for (const auto& [heads, kv_heads] :
         {std::pair{1, 1}, {2, 2}, {4, 2}, {7, 1}, {14, 2}, {8, 1}, {16, 2}, {130, 1}}) {
      const std::vector<int32_t> lengths = heads < 100 ? std::vector<int32_t>{150, 260} : std::vector<int32_t>{70};
      const std::string what = std::to_string(heads) + " heads of " + std::to_string(kv_heads);
      add("groups", what, shape_of(heads, kv_heads, 16), lengths, heads, {128, 16, kv_heads}, kRandomRows);
      add("groups", what + " sparse", shape_of(heads, kv_heads, 16), lengths, heads, {64, 128, kv_heads}, kSparseRows);
    }
    for (const int head_dim : {8, 16, 24, 32, 64, 80, 128, 192, 256}) {
      const std::string what = "d " + std::to_string(head_dim);
      add("head dimensions", what, shape_of(2, 1, head_dim), {280}, head_dim, {64, 16, 1}, kRandomRows);
      add("head dimensions", what + " gathered", shape_of(2, 1, head_dim), {280}, head_dim, {128, 64, 2},
          kGatheredRows);
    }
    const std::pair<const char*, const RowMaker*> special[] = {
        {"diagonal", &kDiagonalRows}, {"full", &kFullRows},         {"hub", &kHubRows},
        {"nothing", &kNoRows},        {"gathered", &kGatheredRows}, {"only gathered", &kOnlyColumns},
        {"sparse", &kSparseRows}};
    for (const auto& [what, maker] : special) {
      const AttentionShape shape = shape_of(4, 2, 32);
      add("special", what, shape, {1, 129, 0, 400}, 6, {128, 16, 2}, *maker);
      add("special", std::string(what) + ", 24 queries, a list per head", shape, {1, 129, 0, 400}, 6, {64, 24, 4},
          *maker);
      add("special", std::string(what) + ", 128 queries", shape, {1, 129, 0, 400}, 6, {256, 128, 2}, *maker);
    }
    add("dense beside", "random", shape_of(4, 2, 64), {200, 150, 0, 333}, 8, {128, 16, 2}, kRandomRows, {1, 0, 1, 0});
    add("dense beside", "gathered", shape_of(4, 2, 64), {200, 150, 0, 333}, 8, {128, 16, 4}, kGatheredRows,
        {0, 1, 0, 1});
    add("dense beside", "all dense", shape_of(4, 2, 64), {200, 150, 0, 333}, 8, {64, 128, 2}, kNoRows, {1, 1, 1, 1});
    add("many gathered", "half of all keys", shape_of(2, 1, 16), {900}, 9, {64, 128, 2},
        {[](Random&, int, int, int, int) { return -1; }, [](Random& random, int) { return random.below(2) == 0; }});
    return cases;
  }();
  return all;
}

}  // namespace sb
