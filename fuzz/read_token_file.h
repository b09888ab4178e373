#pragma once

#include <algorithm>
#include <vector>

#include "core/errors.h"
#include "data/files/label_mask.h"
#include "data/files/token_dataset.h"
#include "data/files/token_file.h"

// Opens a token file and reads all it offers, up to a bound; bad input may only end in a UserError.
inline void read_token_file(const std::string& path) {
  try {
    const auto file = sb::open_token_file(path);
    std::vector<int32_t> tokens;
    for (int64_t d = 0; d < std::min<int64_t>(file->documents(), 64); ++d) {
      const int64_t length = std::min<int64_t>(file->length(d), 4096);
      tokens.resize(static_cast<size_t>(length));
      file->read(d, file->length(d) - length, length, tokens.data());
      if (file->mask()) SB_CHECK(file->mask()->count(d, 0, file->length(d)) <= file->length(d));
    }
    sb::TokenDatasetOptions options;
    options.paths = {path};
    options.max_sequence_length = 16;
    const sb::TokenDataset data(options, 1);
    for (uint64_t p = 0; p < std::min<uint64_t>(data.size(), 32); ++p) {
      const auto sequence = data.read(p);
      SB_CHECK(static_cast<int64_t>(sequence.tokens.size()) == data.length(p));
    }
  } catch (const sb::UserError&) {
  }
}
