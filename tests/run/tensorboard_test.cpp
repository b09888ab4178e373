#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "core/files/crc32c.h"
#include "run/logs/tensorboard_writer.h"
#include "tests/run/scratch_directory.h"

namespace sb {
namespace {

TEST(Crc32c, KnownVectors) {
  // RFC 3720 B.4 and the check value of the catalogue of CRC algorithms.
  EXPECT_EQ(crc32c(0, "123456789", 9), 0xE3069283u);
  EXPECT_EQ(crc32c(0, std::string(32, '\0').data(), 32), 0x8A9136AAu);
  EXPECT_EQ(crc32c(0, std::string(32, '\xff').data(), 32), 0x62A8AB43u);
  std::string ascending, descending;
  for (int i = 0; i < 32; ++i) {
    ascending.push_back(static_cast<char>(i));
    descending.push_back(static_cast<char>(31 - i));
  }
  EXPECT_EQ(crc32c(0, ascending.data(), 32), 0x46DD794Eu);
  EXPECT_EQ(crc32c(0, descending.data(), 32), 0x113FDB5Cu);
  EXPECT_EQ(crc32c(0, "", 0), 0u);
}

// Bit by bit, from the polynomial.
uint32_t slow_crc32c(const std::string& data) {
  uint32_t crc = ~0u;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
  }
  return ~crc;
}

TEST(Crc32c, AllLengthsAndSplitsAgreeWithTheDefinition) {
  std::string data;
  for (int i = 0; i < 70; ++i) data.push_back(static_cast<char>(i * 37 + 11));
  for (size_t n = 0; n <= data.size(); ++n) {
    const uint32_t expected = slow_crc32c(data.substr(0, n));
    EXPECT_EQ(crc32c(0, data.data(), n), expected) << n;
    for (size_t split = 0; split <= n; split += 5)
      EXPECT_EQ(crc32c(crc32c(0, data.data(), split), data.data() + split, n - split), expected) << n << " " << split;
  }
}

// A reader of event files that shares nothing with the writer.
struct DecodedEvent {
  double wall_time = 0;
  int64_t step = 0;
  std::string file_version;
  int64_t session_status = 0;
  std::map<std::string, float> scalars;
};

class Decoder {
 public:
  explicit Decoder(std::string data) : data_(std::move(data)) {}
  bool done() const { return at_ == data_.size(); }
  template <typename T>
  T raw() {
    T value;
    EXPECT_LE(at_ + sizeof value, data_.size());
    std::memcpy(&value, data_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = raw<uint8_t>();
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return value;
    }
  }
  std::string bytes(uint64_t count) {
    EXPECT_LE(at_ + count, data_.size());
    std::string result = data_.substr(at_, count);
    at_ += count;
    return result;
  }

 private:
  std::string data_;
  size_t at_ = 0;
};

uint32_t masked(const std::string& data) {
  const uint32_t crc = slow_crc32c(data);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

std::pair<std::string, float> decode_value(const std::string& message) {
  Decoder in(message);
  std::pair<std::string, float> result;
  while (!in.done()) {
    const uint64_t key = in.varint();
    if (key == (1 << 3 | 2))
      result.first = in.bytes(in.varint());
    else if (key == (2 << 3 | 5))
      result.second = in.raw<float>();
    else
      ADD_FAILURE() << "unexpected key " << key;
  }
  return result;
}

DecodedEvent decode_event(const std::string& message) {
  Decoder in(message);
  DecodedEvent event;
  while (!in.done()) {
    const uint64_t key = in.varint();
    if (key == (1 << 3 | 1)) {
      event.wall_time = in.raw<double>();
    } else if (key == (2 << 3 | 0)) {
      event.step = static_cast<int64_t>(in.varint());
    } else if (key == (3 << 3 | 2)) {
      event.file_version = in.bytes(in.varint());
    } else if (key == (5 << 3 | 2)) {
      Decoder summary(in.bytes(in.varint()));
      while (!summary.done()) {
        EXPECT_EQ(summary.varint(), uint64_t{1 << 3 | 2});
        event.scalars.insert(decode_value(summary.bytes(summary.varint())));
      }
    } else if (key == (7 << 3 | 2)) {
      Decoder session(in.bytes(in.varint()));
      EXPECT_EQ(session.varint(), uint64_t{1 << 3 | 0});
      event.session_status = static_cast<int64_t>(session.varint());
    } else {
      ADD_FAILURE() << "unexpected key " << key;
      return event;
    }
  }
  return event;
}

std::vector<DecodedEvent> decode_file(const std::filesystem::path& file) {
  Decoder in(read_bytes(file));
  std::vector<DecodedEvent> events;
  while (!in.done()) {
    const std::string length_bytes = in.bytes(8);
    uint64_t length;
    std::memcpy(&length, length_bytes.data(), 8);
    EXPECT_EQ(in.raw<uint32_t>(), masked(length_bytes));
    const std::string message = in.bytes(length);
    EXPECT_EQ(in.raw<uint32_t>(), masked(message));
    events.push_back(decode_event(message));
  }
  return events;
}

TEST(TensorBoard, AnIndependentReaderFindsWhatWasWritten) {
  ScratchDirectory scratch;
  TensorBoardWriter writer(scratch / "tb", 301);
  EXPECT_EQ(writer.file().filename().string().find("events.out.tfevents."), 0u);
  const std::vector<Scalar> first = {{"train/loss", 2.5}, {"train/grad_norm", 0.125}};
  const std::vector<Scalar> second = {{"train/loss", -1e-3}, {std::string(300, 'x'), NAN}};
  writer.write(301, first);
  writer.write(5'000'000'000, second);

  const std::vector<DecodedEvent> events = decode_file(writer.file());
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_EQ(events[1].session_status, 1);
  EXPECT_EQ(events[1].step, 301);
  EXPECT_EQ(events[2].step, 301);
  EXPECT_EQ(events[2].scalars, (std::map<std::string, float>{{"train/loss", 2.5f}, {"train/grad_norm", 0.125f}}));
  EXPECT_EQ(events[3].step, 5'000'000'000);
  EXPECT_FLOAT_EQ(events[3].scalars.at("train/loss"), -1e-3f);
  EXPECT_TRUE(std::isnan(events[3].scalars.at(std::string(300, 'x'))));
  for (const DecodedEvent& event : events) EXPECT_GT(event.wall_time, 1.6e9);
}

TEST(TensorBoard, UnwritableDirectoryIsAnError) {
  ScratchDirectory scratch;
  write_bytes(scratch / "file", "");
  EXPECT_ANY_THROW(TensorBoardWriter(scratch / "file", 1));
}

}  // namespace
}  // namespace sb
