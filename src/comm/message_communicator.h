#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "comm/transport.h"
#include "comm/world.h"

namespace sb {

// The group "world" of all processes a transport connects. Reductions add in rank order, so that the bits are those of
// ranks in one process. At most 65536 tags and 511 splits.
std::unique_ptr<Communicator> make_message_communicator(const std::function<std::unique_ptr<Transport>()>& open,
                                                        std::chrono::milliseconds timeout);

// The same, whose ranks learn from their watch (peer_watch.h) when one of them is gone, and then end.
std::unique_ptr<Communicator> make_watched_communicator(const std::function<std::unique_ptr<Transport>()>& open,
                                                        const WorldOptions& options);

}  // namespace sb
