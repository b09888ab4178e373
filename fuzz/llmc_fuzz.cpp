#include "fuzz/read_token_file.h"
#include "fuzz/scratch_folder.h"

// The input is an llm.c token file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  folder.write("a.bin", {reinterpret_cast<const char*>(data), size});
  read_token_file(folder.path("a.bin"));
  return 0;
}
