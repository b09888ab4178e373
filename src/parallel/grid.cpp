#include "parallel/grid.h"

#include <unistd.h>

#include <algorithm>
#include <functional>

namespace sb {

void check_grid(const GridShape& shape, int ranks) {
  SB_CHECK(shape.dp > 0 && shape.pp > 0 && shape.cp > 0, "grid of {} x {} x {}", shape.dp, shape.pp, shape.cp);
  SB_USER_CHECK(ranks == shape.ranks(),
                "parallel: dp {} x pp {} x cp {} need {} ranks, but {} were started: start the program with `--ranks "
                "{}` or `mpirun -n {}`, or change parallel.dp, parallel.pp or parallel.cp",
                shape.dp, shape.pp, shape.cp, shape.ranks(), ranks, shape.ranks(), shape.ranks());
}

Grid::Grid(Communicator& world, const GridShape& shape, Communicator* data) : world_(world), shape_(shape) {
  check_grid(shape, world.size());
  cp_rank_ = world.rank() % shape.cp;
  stage_ = world.rank() / shape.cp % shape.pp;
  dp_rank_ = world.rank() / shape.cp / shape.pp;
  const int replica = dp_rank_ * shape.cp + cp_rank_;
  Communicator& all = data ? *data : world;
  replicas_ = all.split(stage_, replica, "dp");
  pipeline_ = all.split(replica, stage_, "pp");
  context_ = all.split(dp_rank_ * shape.pp + stage_, cp_rank_, "cp");
  const bool end = shape.pp > 1 && (first_stage() || last_stage());
  ends_ = all.split(end ? replica : -1, stage_, "pipeline ends");
}

MachineRanks ranks_on_this_machine(Communicator& world) {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  std::vector<uint64_t> machines(static_cast<size_t>(world.size()));
  uint64_t& own = machines[static_cast<size_t>(world.rank())];
  own = std::hash<std::string>()(name);
  const uint64_t here = own;
  world.all_gather_async(machines.data(), 1, CommType::i64).wait();
  return {static_cast<int>(std::count(machines.begin(), machines.end(), here)),
          static_cast<int>(std::count(machines.begin(), machines.begin() + world.rank(), here))};
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
