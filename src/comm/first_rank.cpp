#include "comm/first_rank.h"

#include <future>

namespace sb {
namespace {

bool tell(Communicator& group, bool done) {
  int32_t value = done ? 1 : 0;
  group.broadcast(std::span(&value, 1), 0);
  return value != 0;
}

}  // namespace

void on_first_rank(Communicator& group, const std::function<void()>& work) {
  if (group.size() == 1) return work();
  if (group.rank() != 0) {
    while (!tell(group, false)) continue;
    return;
  }
  std::future<void> result = std::async(std::launch::async, work);
  while (result.wait_for(group.timeout() / 4) != std::future_status::ready) tell(group, false);
  result.get();
  tell(group, true);
}

void on_all_ranks(Communicator& group, const std::function<void()>& work) {
  if (group.size() == 1) return work();
  std::future<void> result = std::async(std::launch::async, work);
  bool done = false;
  do {
    if (!done && result.wait_for(group.timeout() / 4) == std::future_status::ready) {
      result.get();
      done = true;
    }
  } while (group.all_reduce(int32_t{done}, ReduceOp::min) == 0);
}

}  // namespace sb
