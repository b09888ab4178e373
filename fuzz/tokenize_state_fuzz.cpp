#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"
#include "data/files/token_file.h"
#include "data/text/tokenize_job.h"
#include "fuzz/scratch_folder.h"

namespace {

// What an interrupted `data tokenize` of two files left, but for its state.json.
struct Interrupted {
  ScratchFolder folder;
  sb::TokenizeOptions options;

  Interrupted() {
    folder.write("a.jsonl", "{\"text\": \"some words here\"}\n{\"text\": \"and more of them\"}\n");
    folder.write("b.jsonl", "{\"prompt\": \"to be\", \"completion\": \" tokenized\"}\n");
    options.tokenizer = SB_SOURCE_DIR "/fuzz/corpus/tokenizer_json/gpt2";
    options.inputs = {folder.path("a.jsonl"), folder.path("b.jsonl")};
    options.output = folder.path("out");
    options.overwrite = true;
    options.workers = 1;
    options.skip_bad_lines = true;
  }

  // "@" in the state stands for the folder, which is another in every process, and "%" for that of the sources.
  void write_state(std::string_view text) {
    std::string state;
    for (const char c : text) {
      if (c == '@')
        state += folder.path("");
      else if (c == '%')
        state += SB_SOURCE_DIR;
      else
        state += c;
    }
    std::filesystem::create_directories(folder.path("out.partial"));
    for (const char* part : {"bin", "lengths", "valid", "bitmap_sizes", "bitmaps"})
      folder.write(std::string("out.partial/") + part, std::string(64, '\1'));
    folder.write("out.partial/state.json", state);
  }
};

}  // namespace

// The input is PREFIX.partial/state.json: refused with a UserError, or gone on with.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Interrupted interrupted;
  interrupted.write_state({reinterpret_cast<const char*>(data), size});
  try {
    const sb::TokenizeProgress done = sb::tokenize_files(interrupted.options, [](const sb::TokenizeProgress&) {});
    SB_CHECK(done.bytes >= 0 && done.bytes <= done.total_bytes, "{} of {} bytes", done.bytes, done.total_bytes);
  } catch (const sb::UserError&) {
  }
  return 0;
}
