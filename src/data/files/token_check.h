#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "data/files/token_file.h"

namespace sb {

class ThreadPool;

// Refuses ids below 0 or from `vocab_size` on (0: any number that is not negative) among tokens that were read from
// `begin` on of a document: a UserError that names the file, the document, the token and the cure.
void check_token_ids(const TokenFile& file, int64_t document, int64_t begin, std::span<const int32_t> tokens,
                     int64_t vocab_size);

// The same for whole files, as far as a start can wait for it: every token up to `most_tokens`, of more than that
// pieces at even distances. A file made with another tokenizer has strange ids everywhere; a single one in a rare place
// is found when it is read. Returns how many tokens were looked at.
int64_t spot_check_ids(const std::vector<const TokenFile*>& files, int64_t vocab_size, int64_t most_tokens);

struct TokenCheck {
  int64_t documents = 0, tokens = 0, targets = 0;
  int64_t short_documents = 0;  // fewer than two tokens: training leaves them out
  int32_t smallest = INT32_MAX, largest = INT32_MIN;
  int64_t outside_tokens = 0, outside_documents = 0, wrong_masks = 0;
  // The first of each kind in the file.
  struct Outside {
    int64_t document, token;
    int32_t id;
  };
  std::optional<Outside> outside;
  std::optional<int64_t> wrong_mask;  // document whose mask promises another number of targets than it has

  bool sound() const { return outside_tokens == 0 && wrong_masks == 0; }
};

// Reads a file from end to end. `progress` is called with the tokens done so far, by one thread at a time.
TokenCheck check_token_file(const TokenFile& file, int64_t vocab_size, ThreadPool& threads,
                            const std::function<void(int64_t tokens)>& progress = {});

}  // namespace sb
