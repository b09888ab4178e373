#pragma once

#include <cuda.h>

namespace softgpu {

// The driver's cuTensorMapEncodeTiled.
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

}  // namespace softgpu
