#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

struct CurriculumOptions {
  int64_t start = 64;
  int64_t end = 2048;
  double threshold = 0.8;        // the length doubles when the running accuracy passes this
  double smoothing = 0.9;        // weight of the past in the running accuracy, per observation
  int64_t min_observations = 5;  // at one length before it may double
};

// A length that doubles as the model learns. What it has decided is a short list of (first position, length), so that
// the length at any position, past or future, is a lookup and a resumed run repeats it exactly.
class LengthCurriculum {
 public:
  explicit LengthCurriculum(CurriculumOptions options);

  int64_t length_at(uint64_t position) const;
  int64_t current_length() const { return switches_.back().length; }
  double running_accuracy() const;
  const CurriculumOptions& options() const { return options_; }

  // Returns true when the length doubles, from `next_position` on, or from the last switch where that lies ahead of it
  // (a run that looked further ahead may have been resumed by one that does not).
  bool observe(int64_t correct, int64_t counted, uint64_t next_position);

  // "curriculum 1 <observations> <accuracy as a hexadecimal float> <position>:<length> ..."
  std::string state() const;
  void restore(const std::string& state);

 private:
  struct Switch {
    uint64_t position;
    int64_t length;
  };

  CurriculumOptions options_;
  std::vector<Switch> switches_;
  int64_t observations_ = 0;  // at the current length
  double average_ = 0.0;      // exponential, biased to 0; running_accuracy() corrects it
};

}  // namespace sb
