#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/files/mapped_file.h"

namespace sb {

// One tensor of a safetensors file, as its header describes it and as it was checked to be.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // the file's word: "F32", "BF16", …
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes from the start of the data
  int64_t elements() const;
  std::string shape_text() const;  // "[3, 4]"
};

struct SafetensorsHeader {
  int64_t data_offset = 0;                // where the data starts in the file
  std::vector<SafetensorsEntry> entries;  // by place in the file; they cover the data without gaps or overlap
  std::map<std::string, std::string> metadata;
};

// Checks a whole file (header length, JSON, names, types, shapes, offsets); UserError names `where`, the tensor and
// what is wrong with it. Nothing in the file is trusted.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& where);

// A safetensors file, mapped into memory.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  std::filesystem::path path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }
  const SafetensorsEntry* find(std::string_view name) const;  // nullptr: not there
  std::span<const std::byte> data(const SafetensorsEntry& entry) const;
  // The tensor as fp32, from F32, BF16 or F16; `to` has its number of elements. NaN and infinity are refused: a model
  // with such a weight gives no loss that is a number, and learns nothing.
  void read_f32(const SafetensorsEntry& entry, std::span<float> to) const;
  // The same of its elements from `first` on, as many as `to` has.
  void read_f32_from(const SafetensorsEntry& entry, int64_t first, std::span<float> to) const;

 private:
  std::span<const std::byte> bytes() const {
    return {reinterpret_cast<const std::byte*>(file_.data()), static_cast<size_t>(file_.size())};
  }

  MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string_view, const SafetensorsEntry*> by_name_;
};

struct SafetensorsTensor {
  std::string name;
  std::vector<int64_t> shape;
  const float* data = nullptr;
  // Where there is no data yet: called when the tensor's turn comes; what it returns must last until the next one's.
  std::function<const float*()> fetch = {};
  int64_t elements() const;
};

// Writes the tensors as f32 or bf16, in the given order, with the metadata `transformers` asks for, and syncs the file.
// Returns the file's CRC-32C. UserError, and no file left, when the disk refuses.
uint32_t write_safetensors(const std::filesystem::path& file, std::span<const SafetensorsTensor> tensors, DType dtype);

}  // namespace sb
