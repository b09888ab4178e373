#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/text/document_encoder.h"

namespace sb {

struct TokenizeOptions {
  std::string tokenizer;            // path of a tokenizer.json
  std::vector<std::string> inputs;  // JSONL files
  std::string output;               // prefix
  DocumentEncoderOptions documents;
  std::string text_key = "text";
  bool skip_bad_lines = false;
  int workers = 1;
  double checkpoint_seconds = 5.0;  // work that an interruption may cost
  bool restart = false;             // forget an interrupted run instead of going on from it
  bool overwrite = false;           // replace a finished output
};

struct TokenizeProgress {
  int64_t bytes = 0, total_bytes = 0;  // of input
  int64_t documents = 0, tokens = 0, bad_lines = 0;
  int64_t resumed_bytes = 0;  // of `bytes`, those an earlier run had done
};

// Writes one document a line to token files. `progress` is called after each batch of lines, a few times a second; a
// checkpoint is taken now and then, from which the same call goes on after an interruption. An exception from
// `progress` ends the run like an interruption does.
TokenizeProgress tokenize_files(const TokenizeOptions& options,
                                const std::function<void(const TokenizeProgress&)>& progress);

}  // namespace sb
