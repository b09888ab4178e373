#include "fuzz/read_token_file.h"
#include "fuzz/scratch_folder.h"

// The input is an index.json, a zero byte, and its shard, which the index calls "s".
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = input.find('\0');
  folder.write("index.json", input.substr(0, zero));
  folder.write("s", zero == std::string_view::npos ? "" : input.substr(zero + 1));
  read_token_file(folder.path(""));
  return 0;
}
