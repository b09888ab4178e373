#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace sb {

struct GridShape {
  int dp = 1, pp = 1, cp = 1, tp = 1;
  int ranks() const { return dp * pp * cp * tp; }
};

// Where a rank of the world stands on the grid.
struct GridPlace {
  int dp, stage, cp, tp;
};
GridPlace grid_place(const GridShape& shape, int rank);

// UserError, with the cure, when so many ranks do not make this grid.
void check_grid(const GridShape& shape, int ranks);

// The ranks of a run as a grid: tensor-parallel ranks stand side by side, then context-parallel ones, then the stages
// of a pipeline, then its data-parallel copies.
class Grid {
 public:
  // Collective over the world. `data`: the same ranks for buffers on their devices, from which all groups are made;
  // nullptr: the world.
  Grid(Communicator& world, const GridShape& shape, Communicator* data = nullptr);

  const GridShape& shape() const { return shape_; }
  int dp_rank() const { return dp_rank_; }
  int stage() const { return stage_; }
  int cp_rank() const { return cp_rank_; }
  int tp_rank() const { return tp_rank_; }
  bool first_stage() const { return stage_ == 0; }
  bool last_stage() const { return stage_ == shape_.pp - 1; }
  // Rank in the world of a place on the grid.
  int rank_of(int dp_rank, int stage, int cp_rank, int tp_rank) const {
    return ((dp_rank * shape_.pp + stage) * shape_.cp + cp_rank) * shape_.tp + tp_rank;
  }

  Communicator& world() { return world_; }
  // All with this rank's stage and part of it: they hold the same parameters, share their optimizer and add their
  // gradients. Ranks are ordered by (data-parallel, context-parallel) rank.
  Communicator& replicas() { return *replicas_; }
  // The stages of this rank's pipeline, in order.
  Communicator& pipeline() { return *pipeline_; }
  Communicator& context() { return *context_; }
  // Those that share the products of this rank's stage.
  Communicator& tensor() { return *tensor_; }
  // First and last stage of this rank's pipeline, which both hold a tied embedding; nullptr on the other stages and
  // where one stage is both.
  Communicator* ends() { return ends_.get(); }

 private:
  Communicator& world_;
  GridShape shape_;
  int dp_rank_, stage_, cp_rank_, tp_rank_;
  std::unique_ptr<Communicator> replicas_, pipeline_, context_, tensor_, ends_;
};

// The ranks on this machine: how many, which of them this one is, and its share of the cores. Collective.
struct MachineRanks {
  int count = 1, index = 0;
  int cores = 1;
};
MachineRanks ranks_on_this_machine(Communicator& world);
// The share of rank `own`, when the ranks of a machine may use these cores each: launchers bind ranks to cores of their
// own, or let all use all.
int core_share(const std::vector<std::vector<int>>& cores, int own);

// Text of any length from `root` to all, and from all to `root` (in rank order; empty elsewhere). Collective.
std::string broadcast_text(Communicator& group, std::string text, int root);
std::vector<std::string> gather_texts(Communicator& group, const std::string& text, int root);

}  // namespace sb
