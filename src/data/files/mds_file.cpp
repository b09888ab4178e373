#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/files/mapped_file.h"
#include "core/files/regular_file.h"
#include "core/utf8.h"
#include "data/files/token_file.h"
#include "data/files/unaligned.h"

// A folder of MosaicML's streaming shards (MDS): index.json names them and their columns. A shard, little-endian: u32
// samples, u32 offsets (samples + 1, from the start of the file), a copy of the configuration, then the samples. A
// sample: u32 sizes of the columns that have none in index.json, then the columns. A column of an ndarray whose shape
// is not in index.json: [type: 1, where that is not either] [dimensions · 4 + log2 of the bytes of each: 1]
// [dimensions] [values].
namespace sb {
namespace {

using Json = nlohmann::json;
constexpr const char* kTokens = "input_ids";
constexpr int64_t kMostIndex = int64_t{1} << 30;
constexpr int kDeepest = 8;

enum class Value : uint8_t { u16 = 16, u32 = 32, i32 = 33, i64 = 65 };
int64_t value_bytes(Value value) {
  return value == Value::u16 ? 2 : value == Value::i64 ? 8 : 4;
}

struct Column {
  bool tokens = false;
  int64_t size = 0;  // of every sample; 0: each has its own
  bool typed = false, shaped = false;
  Value value = Value::i32;
};

class MdsFile final : public TokenFile {
 public:
  explicit MdsFile(const std::string& folder) : name_(folder), folder_(folder) {
    const std::string path = (folder_ / "index.json").string();
    // Nothing deep is of interest, and would cost stack.
    const auto shallow = [](int depth, Json::parse_event_t, Json&) { return depth < kDeepest; };
    const Json json = Json::parse(read_regular_file(path, kMostIndex), shallow, /*allow_exceptions=*/false);
    SB_USER_CHECK(json.is_object() && json.contains("shards") && json["shards"].is_array() && !json["shards"].empty(),
                  "{}: is not an index of MDS shards: `shards` is missing or empty", path);
    for (const Json& shard : json["shards"]) open_shard(shard, fmt::format("{}, shard {}", path, shards_.size()));
    SB_USER_CHECK(!documents_.empty(), "{}: its shards contain no samples", path);
  }

  const std::string& name() const override { return name_; }
  TokenType type() const override { return TokenType::i32; }
  int64_t documents() const override { return std::ssize(documents_); }
  int64_t length(int64_t document) const override { return at(document).count; }

  void read(int64_t document, int64_t begin, int64_t count, int32_t* out) const override {
    const Document& from = at(document);
    SB_CHECK(begin >= 0 && count >= 0 && begin + count <= from.count, "{}: tokens {} to {} of document {}", name_,
             begin, begin + count, document);
    const unsigned char* values = shards_[from.shard]->data() + from.offset;
    for (int64_t i = begin; i < begin + count; ++i) {
      const int64_t id = value(values, from.value, i);
      // Negative ones are in no vocabulary, which is checked like that of all files.
      SB_USER_CHECK(std::in_range<int32_t>(id),
                    "{}: token {} of document {} is {}, which is not in any vocabulary: damaged", name_, i, document,
                    id);
      *out++ = static_cast<int32_t>(id);
    }
  }

 private:
  struct Document {
    uint32_t shard = 0;
    Value value = Value::i32;
    int64_t offset = 0, count = 0;  // of the values
  };

  const Document& at(int64_t document) const {
    SB_CHECK(document >= 0 && document < documents(), "document {} of {}", document, documents());
    return documents_[static_cast<size_t>(document)];
  }

  static int64_t value(const unsigned char* values, Value type, int64_t i) {
    switch (type) {
      case Value::u16:
        return load<uint16_t>(values + 2 * i);
      case Value::u32:
        return load<uint32_t>(values + 4 * i);
      case Value::i32:
        return load<int32_t>(values + 4 * i);
      case Value::i64:
        return load<int64_t>(values + 8 * i);
    }
    return -1;
  }

  static Value value_of(const std::string& type, const std::string& where) {
    if (type == "uint16") return Value::u16;
    if (type == "uint32") return Value::u32;
    if (type == "int32") return Value::i32;
    if (type == "int64") return Value::i64;
    throw UserError("{}: {} are {}; only uint16, uint32, int32 and int64 are supported", where, kTokens,
                    printable(type, 40));
  }

  // The columns of a shard as index.json has them.
  static std::vector<Column> columns_of(const Json& shard, const std::string& where) {
    const auto list = [&](const char* key) -> const Json& {
      SB_USER_CHECK(shard.contains(key) && shard[key].is_array(), "{}: `{}` is missing", where, key);
      return shard[key];
    };
    const Json &names = list("column_names"), &encodings = list("column_encodings"), &sizes = list("column_sizes");
    SB_USER_CHECK(names.size() == encodings.size() && names.size() == sizes.size(),
                  "{}: {} names, {} encodings and {} sizes of columns", where, names.size(), encodings.size(),
                  sizes.size());
    std::vector<Column> columns;
    int found = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      Column& column = columns.emplace_back();
      SB_USER_CHECK(names[i].is_string() && encodings[i].is_string(), "{}: the names of columns must be strings",
                    where);
      SB_USER_CHECK(sizes[i].is_null() || (sizes[i].is_number_unsigned() && sizes[i] <= UINT32_MAX),
                    "{}: the size of a column must be a number of bytes", where);
      if (!sizes[i].is_null()) column.size = sizes[i].get<int64_t>();
      if (names[i] != kTokens) continue;
      ++found;
      column.tokens = true;
      set_encoding(encodings[i].get<std::string>(), column, where);
    }
    SB_USER_CHECK(found == 1, "{}: {} columns are called {}; exactly one must be, from which tokens are read", where,
                  found, kTokens);
    return columns;
  }

  // ndarray, ndarray:TYPE or ndarray:TYPE:SHAPE.
  static void set_encoding(const std::string& encoding, Column& column, const std::string& where) {
    const size_t type = encoding.find(':'), shape = type == std::string::npos ? type : encoding.find(':', type + 1);
    SB_USER_CHECK(encoding.substr(0, type) == "ndarray",
                  "{}: {} are encoded as {}; only arrays (ndarray) are supported, as ProLong has them", where, kTokens,
                  printable(encoding, 40));
    column.typed = type != std::string::npos;
    column.shaped = shape != std::string::npos;
    if (column.typed)
      column.value = value_of(encoding.substr(type + 1, shape == std::string::npos ? shape : shape - type - 1), where);
  }

  void open_shard(const Json& shard, const std::string& where) {
    SB_USER_CHECK(shard.is_object() && shard.contains("raw_data") && shard["raw_data"].is_object() &&
                      shard["raw_data"].contains("basename") && shard["raw_data"]["basename"].is_string(),
                  "{}: `raw_data` with a `basename` is missing", where);
    SB_USER_CHECK(!shard.contains("format") || shard["format"] == "mds", "{}: is not an MDS shard but {}", where,
                  printable(shard["format"].dump(), 40));
    const std::string file = shard["raw_data"]["basename"].get<std::string>();
    SB_USER_CHECK(!file.empty() && file.find('/') == std::string::npos && file != "." && file != "..",
                  "{}: \"{}\" is not the name of a file in this directory", where, printable(file, 80));
    SB_USER_CHECK(std::filesystem::exists(folder_ / file) || !shard.contains("zip_data") || shard["zip_data"].is_null(),
                  "{}: {} is only there in compressed form; decompress it first", where, printable(file, 80));
    const std::vector<Column> columns = columns_of(shard, where);
    shards_.push_back(std::make_unique<MappedFile>((folder_ / file).string()));
    read_samples(*shards_.back(), columns);
  }

  void read_samples(const MappedFile& file, const std::vector<Column>& columns) {
    SB_USER_CHECK(file.size() >= 8, "{}: truncated: {} bytes are too few for a shard", file.path(), file.size());
    const int64_t samples = load<uint32_t>(file.data());
    SB_USER_CHECK(samples <= file.size() / 4 - 2, "{}: truncated: {} bytes do not hold the offsets of {} samples",
                  file.path(), file.size(), samples);
    for (int64_t s = 0; s < samples; ++s) {
      const int64_t begin = load<uint32_t>(file.data() + 4 * (s + 1)), end = load<uint32_t>(file.data() + 4 * (s + 2));
      SB_USER_CHECK(begin >= 4 * (samples + 2) && begin <= end && end <= file.size(),
                    "{}: sample {} lies from byte {} to {} of {}: truncated or damaged", file.path(), s, begin, end,
                    file.size());
      documents_.push_back(document_in(file, columns, begin, end, s));
    }
  }

  Document document_in(const MappedFile& file, const std::vector<Column>& columns, int64_t begin, int64_t end,
                       int64_t sample) const {
    int64_t heads = 0;
    for (const Column& column : columns) heads += column.size == 0;
    const auto check = [&](bool holds) {
      SB_USER_CHECK(holds, "{}: sample {} (bytes {} to {}) does not match its columns: damaged", file.path(), sample,
                    begin, end);
    };
    check(4 * heads <= end - begin);
    int64_t head = begin, at = begin + 4 * heads, from = 0, to = 0;
    Column tokens;
    for (const Column& column : columns) {
      int64_t size = column.size;
      if (size == 0) {
        size = load<uint32_t>(file.data() + head);
        head += 4;
      }
      check(size <= end - at);
      if (column.tokens) {
        from = at;
        to = at + size;
        tokens = column;
      }
      at += size;
    }
    Document document{static_cast<uint32_t>(shards_.size() - 1), tokens.value, 0, 0};
    const auto byte = [&] {
      check(from < to);
      return file.data()[from++];
    };
    if (!tokens.typed) {
      const int type = byte();
      SB_USER_CHECK(type == 16 || type == 32 || type == 33 || type == 65,
                    "{}: sample {} has {} of type {}; only uint16, uint32, int32 and int64 are supported", file.path(),
                    sample, kTokens, type);
      document.value = static_cast<Value>(type);
    }
    if (!tokens.shaped) {
      const int shape = byte();
      SB_USER_CHECK(shape >> 2 == 1, "{}: sample {} has {} with {} dimensions instead of one", file.path(), sample,
                    kTokens, shape >> 2);
      from += int64_t{1} << (shape & 3);  // how many follows from the size
      check(from <= to);
    }
    check((to - from) % value_bytes(document.value) == 0);
    document.offset = from;
    document.count = (to - from) / value_bytes(document.value);
    return document;
  }

  std::string name_;
  std::filesystem::path folder_;
  std::vector<std::unique_ptr<MappedFile>> shards_;
  std::vector<Document> documents_;
};

}  // namespace

std::unique_ptr<TokenFile> open_mds_folder(const std::string& folder) {
  return std::make_unique<MdsFile>(folder);
}

}  // namespace sb
