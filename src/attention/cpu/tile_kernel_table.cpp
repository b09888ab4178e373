#include "attention/cpu/tile_kernels.h"

namespace sb {

namespace avx2 {
extern const TileKernels kTileKernels;
}
namespace avx512 {
extern const TileKernels kTileKernels;
}

const TileKernels& tile_kernels(CpuIsa isa) {
  return isa == CpuIsa::avx512 ? avx512::kTileKernels : avx2::kTileKernels;
}

}  // namespace sb
