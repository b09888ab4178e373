#include "run/config/run_config_parallel.h"

#include "core/errors.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"

namespace sb {

void add_parallel_options(OptionTable& table, ParallelOptions& parallel) {
  table.section("parallel",
                "Ranks: dp times pp times cp times tp of them. Start them with `--ranks` or `mpirun`, "
                "docs/parallel.md. A resumed run may "
                "have others.");
  table.integer("parallel.dp", &parallel.dp, 1, 1 << 16, "data-parallel ranks");
  table.integer("parallel.pp", &parallel.pp, 1, 1 << 16, "pipeline stages");
  table.integer("parallel.cp", &parallel.cp, 1, 1 << 16,
                "context-parallel ranks: they share every sequence, block by block, and attention is a ring");
  table.integer("parallel.tp", &parallel.tp, 1, 1 << 10,
                "tensor-parallel ranks: they share the products of every layer, the vocabulary and, between the "
                "products, the tokens; best within a machine");
  table.choice<ContextPlacement>("parallel.placement", &parallel.placement,
                                 {{"triangular", ContextPlacement::triangular},
                                  {"shifted", ContextPlacement::shifted},
                                  {"striped", ContextPlacement::striped},
                                  {"zigzag", ContextPlacement::zigzag}},
                                 "which of the cp ranks holds which block; triangular spreads the work best");
  table.integer("parallel.node_size", &parallel.node_size, 0, 1 << 16,
                "cp ranks of one machine: transfers between machines then hide behind a whole turn inside them; 0: a "
                "plain ring");
  table.choice<ParallelOptions::RingLists>(
      "parallel.ring_lists", &parallel.ring_lists,
      {{"auto", ParallelOptions::RingLists::automatic},
       {"device", ParallelOptions::RingLists::device},
       {"host", ParallelOptions::RingLists::host}},
      "device: cuda with cp: where pairs are selected and lists made; auto: on the host (and the GPU waits) for "
      "vertical_slash and for mass with lookahead and with balance.chunk, which device refuses, on the device for all "
      "others");
  table.choice<ParallelOptions::Backend>(
      "parallel.backend", &parallel.backend,
      {{"auto", ParallelOptions::Backend::automatic},
       {"nccl", ParallelOptions::Backend::nccl},
       {"staged", ParallelOptions::Backend::staged}},
      "device: cuda: how data gets from GPU to GPU; staged: through host memory, also where ranks share a GPU; auto: "
      "nccl where each rank has a GPU of its own, else staged");
  table.integer("parallel.timeout", &parallel.timeout, 1, 1 << 20,
                "seconds that a rank waits for another before the run ends; longer than the longest micro-batch, than "
                "saving a checkpoint and than reading the log of balance.replay");
  table.section("parallel.rehearse",
                "Rehearsal of a cluster: plans are made for it, with balance.profile as the profile of its GPUs, and "
                "their micro-batches run on the ranks there are, docs/parallel.md.");
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
                "{}: a rehearsed cluster has both dp and pp, for example parallel.rehearse: {{dp: 4, pp: 4}}",
                table.label(cluster.dp > 0 ? "parallel.rehearse.dp" : "parallel.rehearse.pp"));
  if (!cluster.on()) return;
  const std::string label = table.label("parallel.rehearse.dp");
  SB_USER_CHECK(parallel.pp == 1 && parallel.cp == 1 && parallel.tp == 1,
                "{}: the ranks that run a rehearsal have the whole model and whole sequences; set parallel.pp: 1, "
                "parallel.cp: 1 and parallel.tp: 1",
                label);
  SB_USER_CHECK(cluster.dp % parallel.dp == 0,
                "{}: {} ranks are planned, which the {} ranks there are (parallel.dp) cannot share equally; change one "
                "of them",
                label, cluster.dp, parallel.dp);
  SB_USER_CHECK(cluster.dp <= config.batch.global_batch_size,
                "{}: {} ranks for batch.global_batch_size {}: some would have no sequence", label, cluster.dp,
                config.batch.global_batch_size);
  SB_USER_CHECK(!config.model.init || cluster.pp <= config.model.init->layers,
                "{}: {} stages for {} layers: some would be empty; lower it", table.label("parallel.rehearse.pp"),
                cluster.pp, config.model.init->layers);
  const BalanceOptions& balance = config.balance;
  SB_USER_CHECK(!balance.profile.empty(),
                "{}: step times are predicted, and nothing says of which GPUs; set balance.profile to a profile that "
                "was measured there, or to a built-in one",
                label);
  SB_USER_CHECK(balance.chunk != BalanceOptions::kAutomaticChunk,
                "{}: balance.chunk: auto divides the memory of pipeline stages, which are not here; give the tokens of "
                "a piece, for example balance.chunk: 4096",
                label);
  SB_USER_CHECK(balance.compare_steps == 0,
                "{}: times measured here say nothing of the cluster; remove balance.compare_steps", label);
  SB_USER_CHECK(config.train.recompute != Recompute::chunk || cluster.pp == 1,
                "{}: train.recompute: chunk does not go with the {} stages of the cluster; set train.recompute: layer",
                label, cluster.pp);
}

}  // namespace

void check_parallel(const RunConfig& config, const OptionTable& table) {
  const ParallelOptions& parallel = config.parallel;
  SB_USER_CHECK(parallel.dp <= config.batch.global_batch_size,
                "{}: {} ranks for batch.global_batch_size {}: some would have no sequence", table.label("parallel.dp"),
                parallel.dp, config.batch.global_batch_size);
  SB_USER_CHECK(!config.model.init || parallel.pp <= config.model.init->layers,
                "{}: {} stages for {} layers: some would be empty; lower it", table.label("parallel.pp"), parallel.pp,
                config.model.init->layers);
  SB_USER_CHECK(parallel.node_size == 0 || parallel.cp % parallel.node_size == 0,
                "{}: {} does not divide parallel.cp {}; machines have equal numbers of ranks",
                table.label("parallel.node_size"), parallel.node_size, parallel.cp);
  const SelectionConfig& selection = config.attention.selection;
  SB_USER_CHECK(parallel.cp == 1 || selection.block % selection.query_block == 0,
                "{}: {} does not divide attention.block {}, as it must where ranks share sequences (parallel.cp)",
                table.label("attention.query_block"), selection.query_block, selection.block);
  SB_USER_CHECK(parallel.ring_lists != ParallelOptions::RingLists::device || ring_selects_on_device(selection),
                "{}: device, but vertical_slash and mass with lookahead select their pairs on the host; remove it, or "
                "choose another attention.pattern",
                table.label("parallel.ring_lists"));
  check_rehearsal(config, table);
}

}  // namespace sb
