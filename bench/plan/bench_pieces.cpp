// What a sequence in pieces costs over the same sequence whole: processor time of forward and backward through a model
// on one thread, in turns, and the ratio last.
//
//   bench_pieces [--model narrow|wide] [--tokens 24576] [--chunk 1024] [--repeats 5] [--only whole|pieces]
//
// It also prints a checksum of each one's gradients, to see that a change has left them as they were. Processor time
// hardly notices what else runs on the machine; --only with --repeats 1 is for counting instructions (callgrind).

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "attention/cpu/sparse_attention.h"
#include "bench/plan/workload.h"
#include "core/files/crc32c.h"
#include "model/stage/stage.h"
#include "train/packing.h"
#include "train/training_run.h"

namespace sb {
namespace {

struct Arguments {
  std::string model = "narrow", only;
  int64_t tokens = 24576, chunk = 1024, repeats = 5;
};

RunConfig run_config(const Arguments& arguments) {
  return parse_run_config(
      fmt::format("model:\n  init: {}\n"
                  "data: {{ synthetic: {{ task: chunk_recall, length: {}, vocab_size: 1024 }} }}\n"
                  "attention: {{ pattern: topk, block: 64, budget: 2048, local_blocks: 1, coverage_rows: 8 }}\n",
                  bench::model_yaml(bench::find_model(arguments.model)), arguments.tokens),
      "bench_pieces");
}

double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// One sequence, in pieces of at most so many tokens, through a model of its own.
class Way {
 public:
  Way(const char* name, const Arguments& arguments, int64_t piece)
      : name_(name),
        config_(run_config(arguments)),
        model_(run_model_config(config_)),
        attention_({config_.attention.selection, model_.layers, static_cast<int>(config_.attention.coverage_rows)}),
        stage_(model_, options(arguments.tokens, piece), attention_, /*threads=*/1) {
    stage_.initialize(1);
    const MicroBatch whole = micro_batch(arguments.tokens);
    first_look(micro_batch(std::min({arguments.chunk, arguments.tokens, config_.attention.selection.budget})));
    if (piece >= arguments.tokens) {
      batches_ = {whole};
    } else {
      for (int64_t begin = 0; begin < arguments.tokens; begin += piece)
        batches_.push_back(cut_piece(whole, begin, std::min(begin + piece, arguments.tokens)));
    }
  }

  void step() {
    ThreadPool pool(1);
    const Exec exec{.pool = &pool};
    stage_.parameters().begin_gradients(exec);
    const auto count = static_cast<int>(batches_.size());
    const double begin = processor_seconds();
    for (int i = 0; i < count; ++i) stage_.forward(exec, batches_[static_cast<size_t>(i)], i, {});
    const double middle = processor_seconds();
    for (int i = count - 1; i >= 0; --i) stage_.backward(exec, batches_[static_cast<size_t>(i)], i, {});
    forward_ = std::min(forward_, middle - begin);
    backward_ = std::min(backward_, processor_seconds() - middle);
    attention_.take_report();
  }

  double seconds() const { return forward_ + backward_; }
  void print() {
    uint32_t checksum = 0;
    const ParameterSet& parameters = stage_.parameters();
    for (int i = 0; i < parameters.count(); ++i)
      checksum = crc32c(checksum, parameters.gradient(i).f32(), static_cast<size_t>(parameters.gradient(i).bytes()));
    fmt::print("{:<8} forward {:8.1f} ms, backward {:8.1f} ms, gradients {:08x}\n", name_, 1e3 * forward_,
               1e3 * backward_, checksum);
  }

 private:
  static MicroBatch micro_batch(int64_t tokens) {
    const TokenSequence sequence = bench::drawn_sequence(0, tokens);
    const float weight = 1.0f / static_cast<float>(tokens - 1);
    return make_micro_batch(std::span(&sequence, 1), std::vector<int>{0}, std::span(&weight, 1), 1024);
  }

  // The statistics that blocks are judged by come from a short sequence, which runs dense, as a run begins.
  void first_look(const MicroBatch& batch) {
    ThreadPool pool(1);
    stage_.evaluate({.pool = &pool}, batch, 0, {});
    attention_.use(learn({}, attention_.take_observations()));
  }

  StageOptions options(int64_t tokens, int64_t piece) const {
    StageOptions options;
    options.last_layer = model_.layers;
    options.max_sequence_length = tokens;
    options.max_micro_batch_tokens = std::min(piece, tokens);
    options.slots = static_cast<int>((tokens + piece - 1) / piece);
    if (piece < tokens) options.max_cut_sequence = tokens;
    return options;
  }

  const char* name_;
  RunConfig config_;
  ModelConfig model_;
  SparseAttention attention_;
  Stage stage_;
  std::vector<MicroBatch> batches_;
  double forward_ = 1e300, backward_ = 1e300;  // the least of all steps
};

void run(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    SB_USER_CHECK(i + 1 < argc, "{} needs a value", word);
    const std::string value = argv[++i];
    if (word == "--model")
      arguments.model = value;
    else if (word == "--tokens")
      arguments.tokens = std::stoll(value);
    else if (word == "--chunk")
      arguments.chunk = std::stoll(value);
    else if (word == "--repeats")
      arguments.repeats = std::stoll(value);
    else if (word == "--only")
      arguments.only = value;
    else
      throw UserError("unknown argument {}", word);
  }
  std::unique_ptr<Way> whole, pieces;
  if (arguments.only != "pieces") whole = std::make_unique<Way>("whole", arguments, arguments.tokens);
  if (arguments.only != "whole") pieces = std::make_unique<Way>("pieces", arguments, arguments.chunk);
  for (int64_t i = 0; i < arguments.repeats; ++i)
    for (const auto& way : {&whole, &pieces})
      if (*way) (*way)->step();
  for (const auto& way : {&whole, &pieces})
    if (*way) (*way)->print();
  if (whole && pieces) fmt::print("pieces over whole: {:.4f}\n", pieces->seconds() / whole->seconds());
}

}  // namespace
}  // namespace sb

int main(int argc, char** argv) {
  try {
    sb::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
