#pragma once

#include <functional>

#include "comm/communicator.h"

namespace sb {

// Work that may take longer than anybody waits for a message. Both are collective, and what `work` throws is thrown on
// the rank that did it alone.

// Rank 0 does `work`, on a thread of its own, and the others wait until it is done: they are told all the while that it
// goes on.
void on_first_rank(Communicator& group, const std::function<void()>& work);
// Every rank does its own, and waits until all are done.
void on_all_ranks(Communicator& group, const std::function<void()>& work);

}  // namespace sb
