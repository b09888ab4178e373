#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace sb {

// A group of one: needs no launcher, no library and no other thread. A message to oneself is kept until its receive is
// asked for, or the other way round. abort() throws.
std::unique_ptr<Communicator> make_self_communicator(const std::string& name = "world",
                                                     std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace sb
