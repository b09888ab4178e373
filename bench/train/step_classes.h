#pragma once

#include <string>
#include <vector>

#include "attention/attention.h"
#include "model/micro_batch.h"
#include "model/model_config.h"

namespace sb {

// What this GPU gives: FLOP/s of a bf16 product of 8192³, bytes/s of a copy (read and written).
struct Ceilings {
  double flops, bytes;
};
Ceilings measure_ceilings(const Exec& exec);

struct ClassTime {
  std::string name;
  double milliseconds, floor;
};

// Every class of operations alone, at the sizes and as often as forward and backward of the micro-batch have it, and
// the update of all parameters. Prints the rates of products and passes on the way.
std::vector<ClassTime> measure_classes(const Exec& exec, const ModelConfig& config, const MicroBatch& batch,
                                       int64_t loss_chunk, const Ceilings& ceilings, Attention& attention);

double median(std::vector<double> values);
// A tensor's first elements repeated over all of it, on the device.
void repeat_start(const Exec& exec, TensorView tensor, int64_t elements);

}  // namespace sb
