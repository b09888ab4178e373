#include "core/errors.h"
#include "data/text/text_stream.h"
#include "fuzz/scratch_folder.h"

// The input is a file of text, plain or compressed. Text that is much larger than its file is read in pieces, so that
// only so much of it is held; a target stops after some.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  folder.write("text", {reinterpret_cast<const char*>(data), size});
  try {
    const auto stream = sb::open_text(folder.path("text"));
    for (int piece = 0; piece < 64; ++piece) {
      const std::string_view text = stream->next(1 << 16);
      if (text.empty()) break;
      SB_CHECK(stream->position() >= 0 && stream->position() <= static_cast<int64_t>(size), "{}", stream->position());
    }
  } catch (const sb::UserError&) {
  }
  return 0;
}
