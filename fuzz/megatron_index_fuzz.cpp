#include "fuzz/read_token_file.h"
#include "fuzz/scratch_folder.h"

// The input is a Megatron index over 256 bytes of tokens.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  static const bool ready = [] {
    folder.write("a.bin", std::string(256, '\1'));
    return true;
  }();
  (void)ready;
  folder.write("a.idx", {reinterpret_cast<const char*>(data), size});
  read_token_file(folder.path("a"));
  return 0;
}
