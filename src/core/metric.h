#pragma once

#include <string>

namespace sb {

// One value of a line of metrics.jsonl. What is not finite is written as null (JSON has no NaN).
struct Metric {
  std::string name;
  double value = 0;
  bool integer = false;
};

// Before the name of one of several sources of training data: its loss in a step, nats per target.
inline const std::string kSourceLoss = "loss_source_";

}  // namespace sb
