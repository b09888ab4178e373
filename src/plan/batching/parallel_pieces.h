#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.h"

namespace sb {

// body(i, thread) for every i in [0, count), on the threads of the pool where there is one.
template <typename Body>
void parallel_pieces(ThreadPool* pool, int64_t count, const Body& body) {
  constexpr int64_t kPieces = 32;  // to even out: enough, and not so many that handing them out costs
  if (pool == nullptr) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  pool->parallel_for(count, std::max<int64_t>(1, count / kPieces), [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) body(i, thread);
  });
}

inline int pool_threads(const ThreadPool* pool) {
  return pool == nullptr ? 1 : pool->threads();
}

}  // namespace sb
