#include "train/training_run.h"

#include <algorithm>

#include "attention/dense_attention.h"
#include "attention/sparse_attention.h"
#include "core/errors.h"
#include "core/log.h"
#include "train/host_memory.h"
#include "train/sources.h"

namespace sb {
namespace {

// Nothing is switched off silently: what this build cannot do is refused.
void refuse_unsupported(const RunConfig& config) {
  SB_USER_CHECK(config.device == DeviceKind::cpu, "device: cuda is not available in this build; set device: cpu");
  SB_USER_CHECK(config.parallel.dp == 1 && config.parallel.pp == 1 && config.parallel.cp == 1,
                "parallel: dp {}, pp {}, cp {}: this build trains on one process; set all to 1", config.parallel.dp,
                config.parallel.pp, config.parallel.cp);
  SB_USER_CHECK(config.balance.batching == BalanceOptions::Batching::in_order &&
                    config.balance.ordering == BalanceOptions::Ordering::none &&
                    config.balance.tuning == BalanceOptions::Tuning::none,
                "balance: this build trains with batching: in_order, ordering: none, tuning: off");
}

std::string header(const RunConfig& config, const TrainerParts& parts, const MemoryPlan& plan, int64_t memory_limit) {
  const PackingLimits limits = packing_limits(config.batch, parts.source.max_length());
  const int threads = config.train.threads > 0 ? config.train.threads : available_cores();
  std::string text = "configuration\n";
  text += print_run_config(config);
  if (!text.ends_with('\n')) text += '\n';
  text += fmt::format(
      "\nlayout\n  1 process, {} threads; {} sequences a step, at most {} sequences and {} tokens a "
      "micro-batch\n\nmemory plan\n",
      threads, config.batch.global_batch_size, limits.max_sequences, limits.max_tokens);
  return text + plan.table(memory_limit);
}

std::string footer(const RunConfig& config, const TrainSummary& summary) {
  const std::string output = config.train.output_dir.string();
  std::string text;
  if (summary.seconds > 0)
    text += fmt::format("{} tokens in {} ({:.0f} tokens/s)\n", summary.tokens, format_duration(summary.seconds),
                        static_cast<double>(summary.tokens) / summary.seconds);
  if (summary.skipped > 0) text += fmt::format("{} steps skipped (gradient not finite)\n", summary.skipped);
  if (summary.interrupted)
    return text + fmt::format("stopped after step {} of {}; saved {}; the same command goes on from there\n",
                              summary.steps, config.train.max_steps, summary.checkpoint.string());
  if (summary.first_validation) text += "before: " + format_validation(*summary.first_validation) + "\n";
  if (summary.last_validation) text += "after:  " + format_validation(*summary.last_validation) + "\n";
  text += fmt::format("model       {}\ncheckpoint  {}\nmetrics     {}/metrics.jsonl\n", summary.final_model.string(),
                      summary.checkpoint.string(), output);
  if (config.train.tensorboard) text += fmt::format("curves      tensorboard --logdir {}/tensorboard\n", output);
  return text;
}

}  // namespace

ModelConfig run_model_config(const RunConfig& config) {
  ModelConfig model = config.model.init ? *config.model.init : read_model_config(config.model.path / "config.json");
  adapt_model_config(config, model);
  return model;
}

TrainSummary run_training(const RunConfig& config, std::FILE* out, bool terminal,
                          const std::function<bool()>& stop_requested) {
  refuse_unsupported(config);
  Console console(out, terminal, config.train.log_steps);
  const ModelConfig model = run_model_config(config);
  DenseAttention dense;
  std::optional<SparseAttention> sparse;
  if (config.attention.selection.pattern != SelectionPattern::dense)
    sparse.emplace(SparseAttention::Options{config.attention.selection, model.layers,
                                            static_cast<int>(config.attention.coverage_rows)});
  Attention& attention = sparse ? static_cast<Attention&>(*sparse) : dense;
  const Sources sources = make_sources(config, model.vocab_size);
  const TrainerParts parts{
      model, attention, *sources.train, sources.validation_set, console, stop_requested, sparse ? &*sparse : nullptr};

  const MemoryPlan plan = Trainer::memory_plan(config, parts);
  const int64_t memory = available_host_memory();
  console.text(header(config, parts, plan, memory));
  plan.check_fits(memory, "Lower batch.micro_batch_tokens or data.max_sequence_length, or set train.recompute: layer.");

  RunDirectory directory(config);
  Trainer trainer(config, parts, directory);
  const TrainSummary summary = trainer.run();
  console.text(footer(config, summary));
  return summary;
}

}  // namespace sb
