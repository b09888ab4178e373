#include "data/files/token_writer.h"
#include "fuzz/read_token_file.h"
#include "fuzz/scratch_folder.h"

// The input is a label mask beside a fixed pair of token files: documents of 3, 20 and 9 tokens.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  static const bool ready = [] {
    sb::TokenWriter writer(folder.path("a"), {});
    for (size_t length : {3, 20, 9}) writer.add(std::vector<int32_t>(length, 1));
    writer.finish();
    return true;
  }();
  (void)ready;
  folder.write("a.mask", {reinterpret_cast<const char*>(data), size});
  read_token_file(folder.path("a"));
  return 0;
}
