#include "run/logs/tensorboard_writer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "comm/host_name.h"
#include "core/files/crc32c.h"

namespace sb {
namespace {

// Protobuf wire format, as much as an Event needs.
enum Wire { varint_type = 0, fixed64_type = 1, bytes_type = 2, fixed32_type = 5 };

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_key(std::string& out, int field, Wire wire) {
  put_varint(out, static_cast<uint64_t>(field << 3 | wire));
}

template <typename T>
void put_raw(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void put_bytes(std::string& out, int field, const std::string& bytes) {
  put_key(out, field, bytes_type);
  put_varint(out, bytes.size());
  out += bytes;
}

// Event { 1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary, 7: SessionLog }
std::string event_head(int64_t step) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string event;
  put_key(event, 1, fixed64_type);
  put_raw(event, now);
  put_key(event, 2, varint_type);
  put_varint(event, static_cast<uint64_t>(step));
  return event;
}

// TFRecord hides a checksum's regularity from files that embed checksums.
uint32_t masked_crc(const void* data, size_t bytes) {
  const uint32_t crc = crc32c(0, data, bytes);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& directory, int64_t first_step) {
  std::filesystem::create_directories(directory);
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  file_.emplace(directory / fmt::format("events.out.tfevents.{}.{}.{}.{}", seconds, host_name(), getpid(), first_step),
                RecordFile::Start::anew);

  std::string version = event_head(0);
  put_bytes(version, 3, "brain.Event:2");
  record(version);

  std::string session = event_head(first_step);
  std::string start;
  put_key(start, 1, varint_type);
  put_varint(start, 1);  // SessionLog.START
  put_bytes(session, 7, start);
  record(session);
}

void TensorBoardWriter::write(int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    std::string value;
    put_bytes(value, 1, scalar.tag);
    put_key(value, 2, fixed32_type);
    put_raw(value, static_cast<float>(scalar.value));
    put_bytes(summary, 1, value);
  }
  std::string event = event_head(step);
  put_bytes(event, 5, summary);
  record(event);
}

void TensorBoardWriter::record(const std::string& event) {
  std::string frame;
  put_raw(frame, static_cast<uint64_t>(event.size()));
  put_raw(frame, masked_crc(frame.data(), 8));
  frame += event;
  put_raw(frame, masked_crc(event.data(), event.size()));
  file_->write(frame);
}

}  // namespace sb
