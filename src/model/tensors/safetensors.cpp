#include "model/tensors/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "device/float16.h"

namespace sb {

namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // as the format's own reader
constexpr int kMaxDepth = 3;                      // header { tensor { shape [

// Names come from the file: shortened so that no error drowns in one.
std::string shown_name(std::string_view name) {
  constexpr size_t kLongest = 120;
  return name.size() <= kLongest ? fmt::format("'{}'", name) : fmt::format("'{}…'", name.substr(0, kLongest));
}

int64_t dtype_size(std::string_view dtype) {
  static const std::map<std::string_view, int64_t> sizes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

int64_t product(std::span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t dim : shape) elements *= dim;
  return elements;
}

// The header's JSON, with every name once at its place and no deeper than the format goes.
Json parse_header_json(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> names;  // of the objects that are open
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        SB_USER_CHECK(depth < kMaxDepth, "{}: the header nests deeper than safetensors headers do", where);
        names.emplace_back();
        break;
      case Json::parse_event_t::object_end:
      case Json::parse_event_t::array_end:
        names.pop_back();
        break;
      case Json::parse_event_t::key: {
        const auto& name = parsed.get_ref<const std::string&>();
        SB_USER_CHECK(names.back().insert(name).second, "{}: {} appears twice in the header", where, shown_name(name));
        break;
      }
      case Json::parse_event_t::value:
        break;
    }
    return true;
  };
  try {
    Json header = Json::parse(text, check);
    SB_USER_CHECK(header.is_object(), "{}: the header is not a JSON object", where);
    return header;
  } catch (const Json::exception& error) {
    throw UserError("{}: the header is not valid JSON: {}", where, std::string_view(error.what()).substr(0, 200));
  }
}

int64_t non_negative(const Json& number, const std::string& where, const std::string& name, const char* what) {
  const bool valid = number.is_number_unsigned() && number.get<uint64_t>() <= uint64_t{INT64_MAX};
  SB_USER_CHECK(valid, "{}: tensor {}: {} must be whole and not negative", where, shown_name(name), what);
  return number.get<int64_t>();
}

SafetensorsEntry parse_entry(const std::string& name, const Json& fields, const std::string& where) {
  const auto field = [&](const char* key, Json::value_t type) -> const Json& {
    SB_USER_CHECK(fields.is_object() && fields.contains(key) && fields[key].type() == type,
                  "{}: tensor {} has no valid '{}'", where, shown_name(name), key);
    return fields[key];
  };
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = field("dtype", Json::value_t::string).get<std::string>();
  const int64_t item = dtype_size(entry.dtype);
  SB_USER_CHECK(item > 0, "{}: tensor {} has the unknown type {}", where, shown_name(name), shown_name(entry.dtype));

  int64_t size = item;
  for (const Json& dim : field("shape", Json::value_t::array)) {
    entry.shape.push_back(non_negative(dim, where, name, "dimensions"));
    SB_USER_CHECK(!__builtin_mul_overflow(size, entry.shape.back(), &size), "{}: tensor {}: its shape overflows", where,
                  shown_name(name));
  }
  const Json& offsets = field("data_offsets", Json::value_t::array);
  SB_USER_CHECK(offsets.size() == 2, "{}: tensor {}: data_offsets must be two numbers", where, shown_name(name));
  entry.begin = non_negative(offsets[0], where, name, "data_offsets");
  entry.end = non_negative(offsets[1], where, name, "data_offsets");
  SB_USER_CHECK(entry.begin <= entry.end && entry.end - entry.begin == size,
                "{}: tensor {} {} {} takes {} bytes, but its data_offsets [{}, {}] say otherwise", where,
                shown_name(name), entry.dtype, entry.shape_text(), size, entry.begin, entry.end);
  return entry;
}

}  // namespace

int64_t SafetensorsEntry::elements() const {
  return product(shape);
}

std::string SafetensorsEntry::shape_text() const {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

int64_t SafetensorsTensor::elements() const {
  return product(shape);
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& where) {
  const auto size = static_cast<int64_t>(file.size());
  constexpr std::string_view kGitLfs = "version https://git-lfs";
  SB_USER_CHECK(size < std::ssize(kGitLfs) || std::memcmp(file.data(), kGitLfs.data(), kGitLfs.size()) != 0,
                "{}: a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull` in that folder, or "
                "with `hf download`",
                where);
  SB_USER_CHECK(size >= kLengthBytes, "{}: {} bytes are too few for a safetensors file", where, size);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  SB_USER_CHECK(length <= uint64_t{kMaxHeaderBytes}, "{}: it claims a header of {} bytes; the limit is {}", where,
                length, kMaxHeaderBytes);
  const auto header_bytes = static_cast<int64_t>(length);
  SB_USER_CHECK(header_bytes <= size - kLengthBytes,
                "{}: it claims a header of {} bytes but has {} in all; the file is cut short or no safetensors file",
                where, header_bytes, size);
  const auto* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  const Json parsed = parse_header_json({text, static_cast<size_t>(header_bytes)}, where);

  SafetensorsHeader header;
  header.data_offset = kLengthBytes + header_bytes;
  for (const auto& [name, fields] : parsed.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(parse_entry(name, fields, where));
      continue;
    }
    SB_USER_CHECK(fields.is_object(), "{}: __metadata__ is not an object", where);
    for (const auto& [key, text_value] : fields.items()) {
      SB_USER_CHECK(text_value.is_string(), "{}: __metadata__ {} is not a string", where, shown_name(key));
      header.metadata.emplace(key, text_value.get<std::string>());
    }
  }

  std::sort(header.entries.begin(), header.entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t covered = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    SB_USER_CHECK(entry.begin >= covered,
                  "{}: tensor {} overlaps the one before it (starts at byte {}, that ends at {})", where,
                  shown_name(entry.name), entry.begin, covered);
    SB_USER_CHECK(entry.begin == covered, "{}: {} bytes before tensor {} belong to no tensor", where,
                  entry.begin - covered, shown_name(entry.name));
    covered = entry.end;
  }
  const int64_t data_bytes = size - header.data_offset;
  SB_USER_CHECK(covered <= data_bytes,
                "{}: cut short: the tensors take {} bytes, the file holds {} (tensor {} is not whole)", where, covered,
                data_bytes, shown_name(header.entries.back().name));
  SB_USER_CHECK(covered == data_bytes, "{}: {} bytes after the last tensor belong to none", where,
                data_bytes - covered);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path.string()) {
  SB_USER_CHECK(file_.size() > 0, "{}: the file is empty", path.string());
  header_ = parse_safetensors(bytes(), path.string());
  for (const SafetensorsEntry& entry : header_.entries) by_name_.emplace(entry.name, &entry);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

std::span<const std::byte> SafetensorsFile::data(const SafetensorsEntry& entry) const {
  return bytes().subspan(static_cast<size_t>(header_.data_offset + entry.begin),
                         static_cast<size_t>(entry.end - entry.begin));
}

namespace {

// Bit by bit, whatever the compiler is told about floating-point numbers.
bool is_finite(float value) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (std::bit_cast<uint32_t>(value) & kExponent) != kExponent;
}

}  // namespace

void SafetensorsFile::read_f32(const SafetensorsEntry& entry, std::span<float> to) const {
  SB_CHECK(std::ssize(to) == entry.elements(), "{} elements for {} of shape {}", to.size(), entry.name,
           entry.shape_text());
  read_f32_from(entry, 0, to);
}

void SafetensorsFile::read_f32_from(const SafetensorsEntry& entry, int64_t begin, std::span<float> to) const {
  SB_CHECK(begin >= 0 && begin + std::ssize(to) <= entry.elements(), "{} elements from {} on of {} of shape {}",
           to.size(), begin, entry.name, entry.shape_text());
  const std::byte* from = data(entry).data() + begin * dtype_size(entry.dtype);
  // The data need not be aligned: every element goes through memcpy.
  const auto convert = [&](auto from_bits) {
    for (size_t i = 0; i < to.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, from + 2 * i, sizeof bits);
      to[i] = from_bits(bits);
    }
  };
  if (entry.dtype == "F32") {
    if (!to.empty()) std::memcpy(to.data(), from, to.size_bytes());
  } else if (entry.dtype == "BF16") {
    convert(f32_from_bf16);
  } else if (entry.dtype == "F16") {
    convert(f32_from_f16);
  } else {
    throw UserError("{}: tensor {} has the type {}; weights must be F32, BF16 or F16", file_.path(),
                    shown_name(entry.name), entry.dtype);
  }
  bool finite = true;
  for (const float value : to) finite &= is_finite(value);  // without a branch: there are billions
  if (finite) return;
  const auto first = std::ranges::find_if_not(to, is_finite);
  throw UserError("{}: tensor {} holds {} at element {}: the file is damaged, or of a training that diverged",
                  file_.path(), shown_name(entry.name), *first, begin + (first - to.begin()));
}

uint32_t write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsTensor> tensors, DType dtype) {
  SB_CHECK(dtype == DType::f32 || dtype == DType::bf16, "weights are written as f32 or bf16, not {}",
           dtype_name(dtype));
  nlohmann::ordered_json header;
  header["__metadata__"]["format"] = "pt";
  int64_t offset = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const int64_t end = offset + tensor.elements() * dtype_bytes(dtype);
    header[tensor.name] = {
        {"dtype", dtype == DType::f32 ? "F32" : "BF16"}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // aligns the data

  try {
    DurableFile file(path);
    const uint64_t length = text.size();
    file.write(&length, sizeof length);
    file.write(text.data(), text.size());
    std::vector<uint16_t> piece;
    for (const SafetensorsTensor& tensor : tensors) {
      const int64_t elements = tensor.elements();
      const float* data = tensor.data != nullptr ? tensor.data : tensor.fetch();
      if (dtype == DType::f32) {
        file.write(data, static_cast<size_t>(elements) * sizeof(float));
        continue;
      }
      constexpr int64_t kPiece = 1 << 20;
      for (int64_t begin = 0; begin < elements; begin += kPiece) {
        const int64_t count = std::min(kPiece, elements - begin);
        piece.resize(static_cast<size_t>(count));
        std::transform(data + begin, data + begin + count, piece.begin(), bf16_from_f32);
        file.write(piece.data(), piece.size() * sizeof(uint16_t));
      }
    }
    file.close();
    return file.checksum();
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
    throw;
  }
}

}  // namespace sb
