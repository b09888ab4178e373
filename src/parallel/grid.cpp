#include "parallel/grid.h"

#include <algorithm>
#include <functional>
#include <map>

#include "comm/host_name.h"
#include "core/thread_pool.h"

namespace sb {

GridPlace grid_place(const GridShape& shape, int rank) {
  const int stage_ranks = shape.tp * shape.cp;
  return {rank / stage_ranks / shape.pp, rank / stage_ranks % shape.pp, rank / shape.tp % shape.cp, rank % shape.tp};
}

void check_grid(const GridShape& shape, int ranks) {
  SB_CHECK(shape.dp > 0 && shape.pp > 0 && shape.cp > 0 && shape.tp > 0, "grid of {} x {} x {} x {}", shape.dp,
           shape.pp, shape.cp, shape.tp);
  SB_USER_CHECK(ranks == shape.ranks(),
                "parallel: dp {} x pp {} x cp {} x tp {} need {} ranks, but {} were started: start the program with "
                "`--ranks {}` or `mpirun -n {}`, or change parallel.dp, parallel.pp, parallel.cp or parallel.tp",
                shape.dp, shape.pp, shape.cp, shape.tp, shape.ranks(), ranks, shape.ranks(), shape.ranks());
}

Grid::Grid(Communicator& world, const GridShape& shape, Communicator* data) : world_(world), shape_(shape) {
  check_grid(shape, world.size());
  const GridPlace own = grid_place(shape, world.rank());
  dp_rank_ = own.dp;
  stage_ = own.stage;
  cp_rank_ = own.cp;
  tp_rank_ = own.tp;
  const int replica = dp_rank_ * shape.cp + cp_rank_;
  // Numbers of the ranks that differ in one coordinate alone.
  const int pipeline = replica * shape.tp + tp_rank_, block = dp_rank_ * shape.pp + stage_;
  Communicator& all = data ? *data : world;
  replicas_ = all.split(stage_ * shape.tp + tp_rank_, replica, "dp");
  pipeline_ = all.split(pipeline, stage_, "pp");
  context_ = all.split(block * shape.tp + tp_rank_, cp_rank_, "cp");
  tensor_ = all.split(block * shape.cp + cp_rank_, tp_rank_, "tp");
  const bool end = shape.pp > 1 && (first_stage() || last_stage());
  ends_ = all.split(end ? pipeline : -1, stage_, "pipeline ends");
}

MachineRanks ranks_on_this_machine(Communicator& world) {
  struct Place {
    uint64_t machine = 0;
    uint8_t cores[1024] = {};
  };
  std::vector<Place> places(static_cast<size_t>(world.size()));
  Place& own = places[static_cast<size_t>(world.rank())];
  own.machine = std::hash<std::string>()(host_name());
  for (const int core : usable_cores()) own.cores[core] = 1;
  world.all_gather_async(places.data(), sizeof(Place), CommType::u8).wait();
  MachineRanks ranks{0, 0, 1};
  std::vector<std::vector<int>> cores;
  for (int r = 0; r < world.size(); ++r) {
    const Place& place = places[static_cast<size_t>(r)];
    if (place.machine != own.machine) continue;
    if (r == world.rank()) ranks.index = ranks.count;
    ++ranks.count;
    std::vector<int>& usable = cores.emplace_back();
    for (int core = 0; core < 1024; ++core)
      if (place.cores[core] != 0) usable.push_back(core);
  }
  ranks.cores = core_share(cores, ranks.index);
  return ranks;
}

int core_share(const std::vector<std::vector<int>>& cores, int own) {
  std::map<int, int> users;
  for (const std::vector<int>& usable : cores)
    for (const int core : usable) ++users[core];
  double share = 0;
  for (const int core : cores[static_cast<size_t>(own)]) share += 1.0 / users[core];
  return std::max(1, static_cast<int>(share + 1e-6));
}

std::string broadcast_text(Communicator& group, std::string text, int root) {
  auto bytes = static_cast<int64_t>(text.size());
  group.broadcast(std::span(&bytes, 1), root);
  text.resize(static_cast<size_t>(bytes));
  group.broadcast(std::span(text.data(), text.size()), root);
  return text;
}

std::vector<std::string> gather_texts(Communicator& group, const std::string& text, int root) {
  constexpr int kTag = 7;
  std::vector<int64_t> bytes(static_cast<size_t>(group.size()));
  bytes[static_cast<size_t>(group.rank())] = static_cast<int64_t>(text.size());
  group.all_gather(std::span(bytes), 1);
  if (group.rank() != root) {
    group.send_async(text.data(), static_cast<int64_t>(text.size()), root, kTag).wait();
    return {};
  }
  std::vector<std::string> texts(bytes.size());
  std::vector<CommRequest> requests;
  for (int rank = 0; rank < group.size(); ++rank) {
    std::string& into = texts[static_cast<size_t>(rank)];
    if (rank == root) {
      into = text;
      continue;
    }
    into.resize(static_cast<size_t>(bytes[static_cast<size_t>(rank)]));
    requests.push_back(group.receive_async(into.data(), static_cast<int64_t>(into.size()), rank, kTag));
  }
  for (CommRequest& request : requests) request.wait();
  return texts;
}

}  // namespace sb
