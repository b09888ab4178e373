#include "run/config/run_config_parallel.h"

#include "core/errors.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"

namespace sb {

void add_parallel_options(OptionTable& table, ParallelOptions& parallel) {
  table.section("parallel",
                "The layout of the ranks: dp × pp × cp × tp of them, started with `--ranks` or `mpirun` "
                "(docs/parallel.md). A resumed run may use a different layout.");
  table.integer("parallel.dp", &parallel.dp, 1, 1 << 16, "data-parallel ranks");
  table.integer("parallel.pp", &parallel.pp, 1, 1 << 16, "pipeline stages");
  table.integer("parallel.cp", &parallel.cp, 1, 1 << 16,
                "context-parallel ranks: they split every sequence, block by block, and run ring attention");
  table.integer("parallel.tp", &parallel.tp, 1, 1 << 10,
                "tensor-parallel ranks: they split the matmuls of every layer, the vocabulary and, between matmuls, "
                "the tokens (sequence parallelism); best within one machine");
  table.choice<ContextPlacement>("parallel.placement", &parallel.placement,
                                 {{"triangular", ContextPlacement::triangular},
                                  {"shifted", ContextPlacement::shifted},
                                  {"striped", ContextPlacement::striped},
                                  {"zigzag", ContextPlacement::zigzag}},
                                 "which cp rank holds which block; triangular balances the work best");
  table.integer("parallel.node_size", &parallel.node_size, 0, 1 << 16,
                "cp ranks per machine, for a hierarchical ring: transfers between machines are hidden behind a whole "
                "turn within them; 0: a plain ring");
  table.choice<ParallelOptions::RingLists>(
      "parallel.ring_lists", &parallel.ring_lists,
      {{"auto", ParallelOptions::RingLists::automatic},
       {"device", ParallelOptions::RingLists::device},
       {"host", ParallelOptions::RingLists::host}},
      "device: cuda with cp: where pairs are selected and block lists built; auto: on the host (while the GPU waits) "
      "for vertical_slash, for mass with lookahead and with balance.chunk, none of which device supports, otherwise on "
      "the device");
  table.choice<ParallelOptions::Backend>(
      "parallel.backend", &parallel.backend,
      {{"auto", ParallelOptions::Backend::automatic},
       {"nccl", ParallelOptions::Backend::nccl},
       {"staged", ParallelOptions::Backend::staged}},
      "device: cuda: how data moves between GPUs; staged: through host memory, also if ranks share a GPU; auto: nccl "
      "if each rank has its own GPU, otherwise staged");
  table.integer("parallel.timeout", &parallel.timeout, 0, 1 << 20,
                "seconds that a rank waits for another before it aborts the run; must exceed the time of the longest "
                "micro-batch and of saving a checkpoint; 0: two minutes, 20 predicted steps, a validation and the "
                "writing of a rank's part of a checkpoint at 50 MB/s");
  table.integer("parallel.start_timeout", &parallel.start_timeout, 1, 1 << 20,
                "seconds until all ranks have found each other; one that is alone for longer ends with exit code 1");
  table.section("parallel.rehearse",
                "Rehearses a cluster: steps are planned for it, with balance.profile as the profile of its GPUs, and "
                "their micro-batches run on the ranks at hand (docs/parallel.md).");
  table.integer("parallel.rehearse.dp", &parallel.rehearse.dp, 0, 1 << 16,
                "data-parallel ranks of the cluster, a multiple of parallel.dp; 0: no rehearsal");
  table.integer("parallel.rehearse.pp", &parallel.rehearse.pp, 0, 1 << 16, "pipeline stages of the cluster");
}

namespace {

// What runs here must be what the cluster would run, and what is predicted must be of its GPUs.
void check_rehearsal(const RunConfig& config, const OptionTable& table) {
  const ParallelOptions& parallel = config.parallel;
  const RehearsedGrid& cluster = parallel.rehearse;
  SB_USER_CHECK((cluster.dp > 0) == (cluster.pp > 0),
                "{}: a rehearsed cluster needs both dp and pp, for example parallel.rehearse: {{dp: 4, pp: 4}}",
                table.label(cluster.dp > 0 ? "parallel.rehearse.dp" : "parallel.rehearse.pp"));
  if (!cluster.on()) return;
  const std::string label = table.label("parallel.rehearse.dp");
  SB_USER_CHECK(parallel.pp == 1 && parallel.cp == 1 && parallel.tp == 1,
                "{}: in a rehearsal every rank runs the whole model on whole sequences; set parallel.pp: 1, "
                "parallel.cp: 1 and parallel.tp: 1",
                label);
  SB_USER_CHECK(
      cluster.dp % parallel.dp == 0,
      "{}: {} planned ranks cannot be divided equally among the {} ranks at hand (parallel.dp); change one of the two",
      label, cluster.dp, parallel.dp);
  SB_USER_CHECK(
      cluster.dp <= config.batch.global_batch_size,
      "{}: {} ranks for batch.global_batch_size {}: some would have no sequence; lower it, or raise the batch size",
      label, cluster.dp, config.batch.global_batch_size);
  SB_USER_CHECK(!config.model.init || cluster.pp <= config.model.init->layers,
                "{}: {} stages for {} layers: some would be empty; lower it", table.label("parallel.rehearse.pp"),
                cluster.pp, config.model.init->layers);
  const BalanceOptions& balance = config.balance;
  SB_USER_CHECK(!balance.profile.empty(),
                "{}: a rehearsal predicts step times, but balance.profile does not say for which GPU; set it to a "
                "profile measured on the cluster, or to a built-in one",
                label);
  SB_USER_CHECK(balance.chunk != BalanceOptions::kAutomaticChunk,
                "{}: balance.chunk: auto divides the memory of pipeline stages, which do not exist in a rehearsal; set "
                "the size of a piece in tokens, for example balance.chunk: 4096",
                label);
  SB_USER_CHECK(balance.compare_steps == 0,
                "{}: times measured here say nothing about the cluster; remove balance.compare_steps", label);
  SB_USER_CHECK(
      config.train.recompute != Recompute::chunk || cluster.pp == 1,
      "{}: train.recompute: chunk does not work with the {} pipeline stages of the cluster; set train.recompute: layer",
      label, cluster.pp);
}

}  // namespace

void check_parallel(const RunConfig& config, const OptionTable& table) {
  const ParallelOptions& parallel = config.parallel;
  SB_USER_CHECK(
      parallel.dp <= config.batch.global_batch_size,
      "{}: {} ranks for batch.global_batch_size {}: some would have no sequence; lower it, or raise the batch size",
      table.label("parallel.dp"), parallel.dp, config.batch.global_batch_size);
  SB_USER_CHECK(!config.model.init || parallel.pp <= config.model.init->layers,
                "{}: {} stages for {} layers: some would be empty; lower it", table.label("parallel.pp"), parallel.pp,
                config.model.init->layers);
  SB_USER_CHECK(parallel.node_size == 0 || parallel.cp % parallel.node_size == 0,
                "{}: {} does not divide parallel.cp {}; every machine must have the same number of ranks",
                table.label("parallel.node_size"), parallel.node_size, parallel.cp);
  const SelectionConfig& selection = config.attention.selection;
  SB_USER_CHECK(parallel.cp == 1 || selection.block % selection.query_block == 0,
                "{}: {} does not divide attention.block {}, as it must with parallel.cp above 1; change one of the two",
                table.label("attention.query_block"), selection.query_block, selection.block);
  SB_USER_CHECK(parallel.ring_lists != ParallelOptions::RingLists::device || ring_selects_on_device(selection),
                "{}: device does not support vertical_slash and mass with lookahead, which select their pairs on the "
                "host; remove it, or choose another attention.pattern",
                table.label("parallel.ring_lists"));
  check_rehearsal(config, table);
}

}  // namespace sb
