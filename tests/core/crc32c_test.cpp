#include "core/files/crc32c.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "core/random.h"

namespace sb {
namespace {

// Bit by bit from the definition: the reflected polynomial of Castagnoli, all ones before and after.
uint32_t by_definition(const std::vector<unsigned char>& data, size_t begin, size_t end) {
  uint32_t state = 0xffffffff;
  for (size_t i = begin; i < end; ++i) {
    state ^= data[i];
    for (int bit = 0; bit < 8; ++bit) state = (state & 1) != 0 ? (state >> 1) ^ 0x82f63b78u : state >> 1;
  }
  return ~state;
}

std::vector<unsigned char> random_bytes(size_t count) {
  Random random(11);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.next_u32());
  return bytes;
}

// RFC 3720, B.4.
TEST(Crc32c, PublishedVectors) {
  std::vector<unsigned char> data(32, 0);
  EXPECT_EQ(crc32c(0, data.data(), data.size()), 0x8a9136aau);
  data.assign(32, 0xff);
  EXPECT_EQ(crc32c(0, data.data(), data.size()), 0x62a8ab43u);
  std::iota(data.begin(), data.end(), static_cast<unsigned char>(0));
  EXPECT_EQ(crc32c(0, data.data(), data.size()), 0x46dd794eu);
  std::iota(data.rbegin(), data.rend(), static_cast<unsigned char>(0));
  EXPECT_EQ(crc32c(0, data.data(), data.size()), 0x113fdb5cu);
  EXPECT_EQ(crc32c(0, nullptr, 0), 0u);
}

TEST(Crc32c, EveryLengthAndPlaceMatchesTheDefinition) {
  const std::vector<unsigned char> data = random_bytes(64);
  for (size_t begin = 0; begin < 9; ++begin)
    for (size_t end = begin; end <= data.size(); ++end)
      ASSERT_EQ(crc32c(0, data.data() + begin, end - begin), by_definition(data, begin, end)) << begin << " " << end;
}

TEST(Crc32c, GoesOnFromARunningValue) {
  const std::vector<unsigned char> data = random_bytes(1000);
  const uint32_t whole = by_definition(data, 0, data.size());
  for (const size_t piece : {1u, 3u, 7u, 8u, 9u, 64u, 999u}) {
    uint32_t running = 0;
    for (size_t at = 0; at < data.size(); at += piece)
      running = crc32c(running, data.data() + at, std::min(piece, data.size() - at));
    EXPECT_EQ(running, whole) << piece;
  }
}

TEST(Crc32c, JoinsAnyNumberOfPiecesInAnyGrouping) {
  const std::vector<unsigned char> data = random_bytes(300);
  const auto part = [&](size_t begin, size_t end) { return by_definition(data, begin, end); };
  for (const size_t a : {0u, 1u, 99u, 150u})
    for (const size_t b : {150u, 151u, 255u, 300u}) {
      const uint32_t left = crc32c_joined(crc32c_joined(part(0, a), part(a, b), b - a), part(b, 300), 300 - b);
      const uint32_t right = crc32c_joined(part(0, a), crc32c_joined(part(a, b), part(b, 300), 300 - b), 300 - a);
      EXPECT_EQ(left, part(0, 300)) << a << " " << b;
      EXPECT_EQ(right, part(0, 300)) << a << " " << b;
    }
}

TEST(Crc32c, NoticesEveryFlippedBit) {
  std::vector<unsigned char> data = random_bytes(40);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  for (size_t bit = 0; bit < 8 * data.size(); ++bit) {
    data[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    EXPECT_NE(crc32c(0, data.data(), data.size()), whole) << bit;
    data[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
  }
}

}  // namespace
}  // namespace sb
