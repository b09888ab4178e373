#pragma once

// Selecting pairs in a ring of GPUs, on the devices: statistics of key blocks (or the channels of keys that blocks are
// judged by) are exchanged, every rank selects for its own queries, and the lists are cut by pass. Nothing waits for
// the host.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/gpu/plan/coverage_log.h"
#include "attention/gpu/plan/recent_plans.h"
#include "attention/gpu/plan/select_memory.h"
#include "comm/communicator.h"
#include "parallel/ring/gpu/cuda_ring_plan.h"
#include "parallel/ring/ring_attention.h"

namespace sb {

class CudaRingSelection {
 public:
  // `data` is the ring's communicator of device memory.
  CudaRingSelection(Communicator& data, const RingAttention::Options& options);

  // Before the first plan: memory for those of so many more states, of micro-batches of at most so many tokens per
  // rank; and how much that is.
  void reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype, size_t states);
  int64_t reserved_bytes(const AttentionShape& shape, int64_t max_tokens, DType dtype, size_t states);
  // The plan of a micro-batch, with the lists of its dense sequences.
  std::shared_ptr<gpu::CudaRingPlan> plan_for(const Exec& exec, int layer, const AttentionShape& shape,
                                              const PackedSequences& sequences, DType dtype);
  // Lists of the sparse sequences, in `list_memory`; and true coverage, where it is asked for.
  void select(const Exec& exec, int layer, const AttentionShape& shape, const AttentionOperands& operands,
              const gpu::CudaRingPlan& plan, gpu::DeviceBuffer& list_memory, LayerAttention& report);
  // Adds what is only known on the device; waits for it.
  void report(AttentionReport& report);
  void use(const LearnedSelection& learned) { select_memory_.use(learned); }
  SelectionObservations take_observations() { return select_memory_.take_observations(); }

 private:
  gpu::RingPlanRequest request_for(int layer, const AttentionShape& shape, std::span<const int32_t> whole_cu_seqlens,
                                   std::span<const int32_t> budgets, DType dtype);
  struct PlanSize {
    AttentionShape shape{};
    int64_t max_tokens = 0;
    DType dtype = DType::bf16;
    int64_t device = 0, uploaded = 0;  // bytes
  };
  const PlanSize& largest_plan(const AttentionShape& shape, int64_t max_tokens, DType dtype);
  size_t different_plans(size_t states) const;
  static void allocate_select(const Exec& exec, const gpu::CudaRingPlan& plan, const gpu::CudaRingPlan::Set& set,
                              gpu::SelectParams& params);
  void gather_statistics(const Exec& exec, const gpu::CudaRingPlan& plan, const gpu::CudaRingPlan::Set& set,
                         gpu::SelectParams& params) const;
  // Row lists of the selection, by pass and by column.
  static void cut(const Exec& exec, const gpu::CudaRingPlan& plan, const gpu::CudaRingPlan::Set& set,
                  const gpu::SelectParams& selected, const gpu::CudaRingPlan::Lists& lists);
  void measure(const Exec& exec, int layer, const AttentionShape& shape, const AttentionOperands& operands,
               const gpu::CudaRingPlan& plan, const uint32_t* row_entries);

  Communicator& data_;
  const RingAttention::Options options_;
  const int multiprocessors_;
  std::optional<bool> hopper_;
  gpu::Staging staging_;
  gpu::RecentPlans<gpu::CudaRingPlan> plans_;
  PlanSize largest_plan_;  // the one asked for last
  gpu::SelectMemory select_memory_;
  gpu::CoverageLog coverage_;
};

}  // namespace sb
