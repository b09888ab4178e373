#include "comm/self_communicator.h"

#include "comm/thread_communicator.h"

namespace sb {

// One thread rank: the last to come is always this one, so nothing ever waits, except for a message to itself.
std::unique_ptr<Communicator> make_self_communicator(const std::string& name, std::chrono::milliseconds timeout) {
  ThreadCommOptions options;
  options.timeout = timeout;
  std::unique_ptr<Communicator> world = std::move(make_thread_communicators(1, options)[0]);
  return name == world->name() ? std::move(world) : world->split(0, 0, name);
}

}  // namespace sb
