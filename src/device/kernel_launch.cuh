#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

namespace sb {

// {grid, block, bytes of dynamic shared memory, stream}: each as between <<< and >>>, so that any integer will do.
struct KernelLaunch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;

  template <typename Grid, typename Block, typename Bytes>
  KernelLaunch(const Grid& blocks, const Block& threads, Bytes bytes, cudaStream_t on)
      : grid(extent(blocks)), block(extent(threads)), shared(static_cast<size_t>(bytes)), stream(on) {}

 private:
  template <typename Count>
  static dim3 extent(const Count& count) {
    if constexpr (std::is_integral_v<Count>)
      return dim3(static_cast<unsigned>(count));
    else
      return count;
  }
};

}  // namespace sb
