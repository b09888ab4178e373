#include "run/time_left.h"

namespace sb {

bool due_after(int64_t step, int64_t every, int64_t last) {
  return step == last || (every > 0 && step % every == 0);
}

int64_t times_due(int64_t step, int64_t every, int64_t last) {
  if (step > last) return 0;
  if (every <= 0) return 1;
  return last / every - (step - 1) / every + (last % every == 0 ? 0 : 1);
}

void TimeLeft::Mean::add(Seconds time) {
  total += time;
  ++count;
}

void TimeLeft::step(Seconds time) {
  step_ = step_.count() == 0 ? time : 0.9 * step_ + 0.1 * time;
}

TimeLeft::Seconds TimeLeft::after(int64_t step) const {
  return step_ * (max_steps_ - step) + validations_.value() * times_due(step, validation_steps_, max_steps_) +
         saves_.value() * times_due(step, save_steps_, max_steps_);
}

}  // namespace sb
