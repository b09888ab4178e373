#pragma once

#include <chrono>
#include <cstdint>

namespace sb {

// What is done every `every` steps (0: never in between) is done after the last step too. Whether that is after `step`,
// and how often it is from `step` to `last`, both included.
bool due_after(int64_t step, int64_t every, int64_t last);
int64_t times_due(int64_t step, int64_t every, int64_t last);

// How long the rest of a run takes: its steps, its validations and its checkpoints. A kind that has not happened yet in
// this process counts nothing, nor does the final model, which is written once.
class TimeLeft {
 public:
  TimeLeft(int64_t max_steps, int64_t validation_steps, int64_t save_steps)
      : max_steps_(max_steps), validation_steps_(validation_steps), save_steps_(save_steps) {}

  using Seconds = std::chrono::duration<double>;
  // What one of them took.
  void step(Seconds time);
  void validation(Seconds time) { validations_.add(time); }
  void save(Seconds time) { saves_.add(time); }

  // After `step`, before the validation and the checkpoint that may be due there.
  Seconds after(int64_t step) const;

 private:
  struct Mean {
    Seconds total{};
    int64_t count = 0;
    void add(Seconds time);
    Seconds value() const { return count > 0 ? total / count : Seconds(0); }
  };

  int64_t max_steps_, validation_steps_, save_steps_;
  Seconds step_{};  // exponential average: lengths and budgets drift
  Mean validations_, saves_;
};

}  // namespace sb
