#pragma once

#include "core/random.h"
#include "data/synthetic/synthetic.h"

// The task generators behind make_synthetic_source(): how one sequence of a given length is made.
namespace sb::synthetic {

// Tokens under construction; `answer` marks those that are to be predicted.
struct Draft {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> answer;

  void add(int64_t token, bool is_answer = false) {
    tokens.push_back(static_cast<int32_t>(token));
    answer.push_back(is_answer);
  }
};

int64_t resolved_min_distance(const SyntheticOptions& options, int64_t length);

// Throws UserError when a sequence of this length cannot be made; a longer one then can.
void check_recall(const SyntheticOptions& options, int64_t length);
int64_t count_recall_targets(const SyntheticOptions& options, int64_t length);
Draft make_recall(const SyntheticOptions& options, int64_t length, Random& random);

// The tasks with facts in a body of noise, a gap, a question and its answer.
void check_retrieval(const SyntheticOptions& options, int64_t length);
int64_t count_retrieval_targets(const SyntheticOptions& options);
Draft make_retrieval(const SyntheticOptions& options, int64_t length, Random& random);

}  // namespace sb::synthetic
