#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "attention/index/block_index.h"
#include "core/errors.h"

// The file: magic, shape, number of sequences, per sequence (length, dense), number of entries and of gathered columns,
// row offsets, blocks, first tokens, gathered offsets, gathered columns, FNV-1a checksum of everything before. All
// little-endian. The column lists follow from the rows and are not stored.

namespace sb {
namespace {

constexpr char kMagic[8] = {'S', 'B', 'I', 'N', 'D', 'E', 'X', '1'};

struct Closer {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Closer>;

class Checksum {
 public:
  void add(const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ p[i]) * 0x100000001b3;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

class Writer {
 public:
  explicit Writer(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "wb")) {
    if (!file_) fail();
  }
  void bytes(const void* data, size_t count) {
    checksum_.add(data, count);
    if (count > 0 && std::fwrite(data, 1, count, file_.get()) != count) fail();
  }
  template <typename T>
  void value(T x) {
    bytes(&x, sizeof(x));
  }
  template <typename T>
  void array(const std::vector<T>& x) {
    bytes(x.data(), x.size() * sizeof(T));
  }
  void close() {
    value(checksum_.value());
    if (std::fclose(file_.release()) != 0) fail();
  }

 private:
  [[noreturn]] void fail() const {
    const int error = errno;
    throw UserError("{}: cannot write the block index: {}", path_, std::strerror(error));
  }
  std::string path_;
  File file_;
  Checksum checksum_;
};

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "rb")) {
    SB_USER_CHECK(file_ != nullptr, "{}: cannot read the block index: {}", path, std::strerror(errno));
    std::fseek(file_.get(), 0, SEEK_END);
    left_ = std::ftell(file_.get());
    std::rewind(file_.get());
  }
  void bytes(void* data, int64_t count) {
    SB_USER_CHECK(
        count <= left_ && (count == 0 || std::fread(data, 1, count, file_.get()) == static_cast<size_t>(count)),
        "{}: the block index is truncated; it was not written completely, so dump it again", path_);
    left_ -= count;
    checksum_.add(data, count);
  }
  template <typename T>
  T value() {
    T x;
    bytes(&x, sizeof(x));
    return x;
  }
  // Refuses a count that the rest of the file cannot hold before it allocates.
  template <typename T>
  void array(std::vector<T>& x, int64_t count) {
    check(count >= 0 && count <= left_ / static_cast<int64_t>(sizeof(T)), "an array is longer than the file");
    x.resize(count);
    bytes(x.data(), count * static_cast<int64_t>(sizeof(T)));
  }
  void check(bool good, const char* what) const {
    SB_USER_CHECK(good, "{}: not a valid block index: {}; dump it again", path_, what);
  }
  void finish() {
    const uint64_t expected = checksum_.value();
    check(value<uint64_t>() == expected, "the checksum differs");
    check(left_ == 0, "there are bytes after its end");
  }

 private:
  std::string path_;
  File file_;
  int64_t left_ = 0;
  Checksum checksum_;
};

template <typename T>
void check_offsets(const Reader& in, const std::vector<uint32_t>& offsets, const std::vector<T>& values) {
  bool good = offsets.front() == 0 && offsets.back() == values.size();
  for (size_t i = 1; i < offsets.size(); ++i) good = good && offsets[i - 1] <= offsets[i];
  in.check(good, "its offsets are not ascending");
}

}  // namespace

void BlockIndex::save(const std::string& path) const {
  const std::string temporary = path + ".tmp";
  Writer out(temporary);
  out.bytes(kMagic, sizeof(kMagic));
  out.value(int32_t{shape_.block});
  out.value(int32_t{shape_.query_block});
  out.value(int32_t{shape_.list_heads});
  out.value(static_cast<int32_t>(sequences_.size()));
  for (const Sequence& sequence : sequences_) {
    out.value(sequence.length);
    out.value(int32_t{sequence.dense});
  }
  out.value(static_cast<int64_t>(row_blocks_.size()));
  out.value(static_cast<int64_t>(gathered_.size()));
  out.array(row_offsets_);
  out.array(row_blocks_);
  out.array(row_first_);
  out.array(gathered_offsets_);
  out.array(gathered_);
  out.close();
  SB_USER_CHECK(std::rename(temporary.c_str(), path.c_str()) == 0, "{}: cannot be written: {}", path,
                std::strerror(errno));
}

void BlockIndex::load(const std::string& path, ThreadPool& pool) {
  Reader in(path);
  char magic[sizeof(kMagic)];
  in.bytes(magic, sizeof(magic));
  in.check(std::memcmp(magic, kMagic, sizeof(kMagic)) == 0, "it begins with other bytes");
  BlockIndexShape shape;
  shape.block = in.value<int32_t>();
  shape.query_block = in.value<int32_t>();
  shape.list_heads = in.value<int32_t>();
  in.check((shape.block == 64 || shape.block == 128 || shape.block == 256) && shape.query_block >= 1 &&
               shape.query_block <= 128 && shape.list_heads >= 1 && shape.list_heads <= 65536,
           "its block sizes are impossible");
  const int32_t count = in.value<int32_t>();
  std::vector<int32_t> table;
  in.array(table, int64_t{count} * 2);
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<uint8_t> dense;
  for (int32_t i = 0; i < count; ++i) {
    const int64_t end = int64_t{cu_seqlens.back()} + table[2 * i];
    in.check(table[2 * i] >= 0 && end <= INT32_MAX && end / shape.block < 65536, "a sequence length is impossible");
    cu_seqlens.push_back(static_cast<int32_t>(end));
    dense.push_back(table[2 * i + 1] != 0);
  }
  const int64_t entries = in.value<int64_t>(), gathered = in.value<int64_t>();

  BlockIndex read;
  // lay_out allocates what the table asks for: no more rows than the file can hold.
  int64_t rows = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (!dense[i]) rows += (int64_t{table[2 * i]} + shape.query_block - 1) / shape.query_block * shape.list_heads;
  }
  std::vector<uint32_t> row_offsets, gathered_offsets;
  in.array(row_offsets, rows + 1);
  in.array(read.row_blocks_, entries);
  in.array(read.row_first_, entries);
  in.array(gathered_offsets, rows + 1);
  in.array(read.gathered_, gathered);
  in.finish();
  check_offsets(in, row_offsets, read.row_blocks_);
  check_offsets(in, gathered_offsets, read.gathered_);

  // Through the builder, which checks every row.
  BlockIndexBuilder builder;
  builder.begin(*this, shape, cu_seqlens, dense, 1);
  std::vector<IndexEntry> row;
  try {
    for (int64_t id = 0; id < rows; ++id) {
      row.clear();
      for (uint32_t i = row_offsets[id]; i < row_offsets[id + 1]; ++i) {
        row.push_back({read.row_blocks_[i], read.row_first_[i]});
      }
      builder.set_row(0, id, row,
                      std::span<const int32_t>(read.gathered_)
                          .subspan(gathered_offsets[id], gathered_offsets[id + 1] - gathered_offsets[id]));
    }
  } catch (const InternalError& error) {
    in.check(false, error.what());
  }
  builder.finish(pool);
}

}  // namespace sb
