#pragma once

#include <functional>

#include "comm/communicator.h"

namespace sb {

// Rank 0 does `work`, on a thread of its own, and the others wait until it is done: however long that takes, since they
// are told all the while that it goes on. What `work` throws is thrown on rank 0 alone. Collective.
void on_first_rank(Communicator& group, const std::function<void()>& work);

}  // namespace sb
