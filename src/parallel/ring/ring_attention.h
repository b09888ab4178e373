#pragma once

#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/sparse_attention.h"
#include "comm/communicator.h"
#include "parallel/ring/context_layout.h"
#include "parallel/ring/ring_plan.h"
#include "parallel/ring/ring_selection.h"
#include "parallel/ring/ring_travel.h"

namespace sb {

// Attention of sequences that the ranks of a group share (context parallelism): every rank has some blocks of every
// sequence, keys and values travel around a ring past all queries, and partial results are put together by their
// log-sum-exp. Dense, or with the pairs of a selection pattern; the same result as one rank alone up to the order of
// sums. All ranks of the group call it with their parts of the same micro-batches, in the same order.
class RingAttention final : public SelectingAttention {
 public:
  // The size of lists, for planning.
  struct Lists {
    int64_t query_block = 1, heads = 0, entries = 0, columns = 0;
    int64_t rows(int64_t tokens) const { return (tokens + query_block - 1) / query_block * heads; }
    int64_t row_bytes() const { return 7 * entries + 4 * columns; }  // by row and by column
    int64_t staged_bytes(int64_t staged_rows, int64_t filled, int threads) const {
      return BlockIndexBuilder::most_bytes(staged_rows, filled * entries, filled * columns, threads);
    }
  };
  struct Options {
    SelectionConfig selection;  // pattern dense: everything
    int layers = 0;
    ContextPlacement placement = ContextPlacement::triangular;
    int node_size = 0;  // ranks of a node, for the hierarchical ring; 0: a plain ring
    // Largest budget that a micro-batch may bring, for the memory plan; 0: the configured one.
    int64_t largest_budget = 0;
    // Rows of every sequence on which the true coverage is measured each forward; 0: none.
    int coverage_rows = 0;
    // A micro-batch may bring budgets that cover its sequences, however long they are.
    bool any_dense = false;
    // Of the activations, for the memory plan of a ring of GPUs.
    DType dtype = DType::f32;
    // A ring of GPUs selects pairs and makes lists on the device (ring_selects_on_device).
    bool lists_on_device = false;
    // A ring of GPUs gives the same bits in every run, with a somewhat slower backward; one of CPUs always does.
    bool deterministic = false;

    // The longest sequence that may run dense, in micro-batches of so many tokens on all ranks.
    int64_t longest_dense(int64_t whole_tokens) const;
    // The most that lists of selected blocks and columns hold where there are so many tokens on all ranks.
    Lists selected_lists(const AttentionShape& shape, int64_t whole_tokens) const;
  };
  // The group must outlive this and carry nothing else.
  RingAttention(Communicator& group, const Options& options);
  ~RingAttention() override;

  // How a micro-batch has to be shared out.
  ContextLayout layout(std::span<const int32_t> whole_cu_seqlens) const;

  std::unique_ptr<AttentionState> make_state() const override;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override;
  int64_t call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  std::string refuses_pieces() const override;
  // Of a piece max_tokens are a rank's.
  PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const override;

  // The index a state holds: of the whole sequences (of a piece: of its sequence up to its end), but with the rows of
  // this rank's query blocks alone. To compare it, or to put one in before a forward with `replay`; on all ranks alike.
  static BlockIndex& index(AttentionState& state);
  // Bytes a state holds now, and the lists of the last call with what selected them.
  static int64_t bytes(const AttentionState& state);
  int64_t call_bytes_used() const { return plan_.bytes() + selection_.bytes(); }
  // What pieces left in every layer, all layers together.
  int64_t layer_bytes_used() const { return selection_.kept_bytes_used(); }
  // Pairs of this rank's queries; coverage on the first rank alone, for all of them.
  AttentionReport take_report() override;
  void use(const LearnedSelection& learned) override { selection_.step().use(learned); }
  SelectionObservations take_observations() override { return selection_.step().take_observations(); }

 private:
  class State;
  class Call;
  // Selects the pairs of a micro-batch into the state.
  void select(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
              const AttentionOperands& operands, State& state);
  void select_piece(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& piece,
                    const AttentionOperands& operands, State& state);
  void measure(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, const State& state);
  bool keeps_statistics() const { return options_.selection.scores_blocks() || options_.coverage_rows > 0; }
  int64_t copies_limit(const AttentionShape& shape, int64_t max_tokens) const;
  // Of a rank: its queries, the keys that travel at once, and those that have copies on all ranks.
  int64_t passes_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int64_t copies,
                               int threads) const;
  Lists dense_lists(const AttentionShape& shape, int64_t whole_tokens) const;
  // What the calls for lists of a rank's queries take: `queries` tokens in rows of `rows`, both of a rank.
  int64_t planned_bytes(const Lists& selected, const Lists& dense, int64_t queries, int64_t rows) const;

  Communicator& group_;
  const Options options_;
  RingSelection selection_;
  RingTravel travel_;
  RingPlan plan_;  // of the call at hand
  AttentionReport report_;
};

// Why sequences that ranks share cannot come in pieces, to follow a colon; empty: they can.
std::string refuses_ring_pieces(const RingAttention::Options& options);

}  // namespace sb
