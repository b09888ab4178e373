#pragma once

#include <cstdint>
#include <string>

#include "eval/eval_model.h"

namespace CLI {
class App;
}

// What the sub-commands of `sparsebalance eval` have in common.
namespace sb {

class Progress;

struct EvalOptions {
  std::string model, adapter, attention = "dense", run_config, json, device = "cpu", precision = "auto";
  int64_t max_tokens = 4096, max_new_tokens = 64;
  int batch = 1, threads = 0;
  bool chat = false;
  bool measure_coverage = false;  // on the run's attention.coverage_rows
  double temperature = 0, top_p = 1;
  uint64_t seed = 1;
};

// Options of all sub-commands, and of those that generate.
void add_common(CLI::App* command, EvalOptions& options, bool model_required);
void add_sampling(CLI::App* command, EvalOptions& options);

EvalModel open_model(const EvalOptions& options);
GenerationOptions generation(const EvalOptions& options);
// Where --json asks for it: a JSON object with results, and what they are of.
void write_json(const EvalOptions& options, const std::string& results);
// "12 of 40", for each of what `all` says.
void show(Progress& progress, size_t done, size_t all, const char* what);

}  // namespace sb
