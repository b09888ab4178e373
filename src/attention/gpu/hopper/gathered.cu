#include "attention/gpu/hopper/gathered.cuh"

#include "attention/gpu/launch/check.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// A thread block a piece; 16 bytes of a row a thread. What pads a list becomes zeros: a probability of zero times
// whatever lay there could be no number.
__global__ void __launch_bounds__(256)
    gather_kernel(const __grid_constant__ GatheredColumns gathered, const uint4* k, const uint4* v, uint4* to_k,
                  uint4* to_v, int kv_heads, int row_pieces) {
  const GatheredList& list = gathered.lists[gathered.pieces[blockIdx.x]];
  const int kv_head = list.head / (gathered.list_heads / kv_heads), token = list.token;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGatheredPiece;
  for (int i = threadIdx.x; i < kGatheredPiece * row_pieces; i += 256) {
    const int row = i / row_pieces, piece = i % row_pieces;
    const int column = gathered.columns[first + row];
    uint4 a = make_uint4(0, 0, 0, 0), b = a;
    if (column != kNoColumn) {
      const int64_t from = (static_cast<int64_t>(token + column) * kv_heads + kv_head) * row_pieces + piece;
      a = k[from];
      b = v[from];
    }
    to_k[(first + row) * row_pieces + piece] = a;
    to_v[(first + row) * row_pieces + piece] = b;
  }
}

// A thread block a list, a thread a key block at a time.
__global__ void __launch_bounds__(256)
    places_kernel(const __grid_constant__ GatheredColumns gathered, GatheredPlace* places) {
  const GatheredList list = gathered.lists[blockIdx.x];
  const int32_t* columns = gathered.columns + list.columns;
  const int count = list.pieces * kGatheredPiece, blocks = (list.tokens + kBlock - 1) / kBlock;
  for (int block = threadIdx.x; block < blocks; block += 256) {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (columns[middle] < block * kBlock)
        low = middle + 1;
      else
        high = middle;
    }
    GatheredPlace place;
    place.first = static_cast<int32_t>(list.columns) + low;
    for (; low < count && columns[low] < (block + 1) * kBlock; ++low) {
      const int at = columns[low] - block * kBlock;
#pragma unroll
      for (int w = 0; w < kBlock / 32; ++w) place.bits[w] |= at / 32 == w ? 1u << at % 32 : 0u;
    }
    places[list.place + block] = place;
  }
}

}  // namespace

void gather_rows(const GatheredColumns& gathered, const Shape& shape, const void* k, const void* v,
                 const GatheredRows& to, cudaStream_t stream) {
  launch_kernel(gather_kernel, {gathered.piece_count, 256, 0, stream}, gathered, static_cast<const uint4*>(k),
                static_cast<const uint4*>(v), static_cast<uint4*>(to.k), static_cast<uint4*>(to.v), shape.kv_heads,
                shape.head_dim / 8);
  check(cudaGetLastError(), "gathered columns");
}

void find_gathered_places(const GatheredColumns& gathered, GatheredPlace* places, cudaStream_t stream) {
  launch_kernel(places_kernel, {gathered.list_count, 256, 0, stream}, gathered, places);
  check(cudaGetLastError(), "places of gathered columns");
}

}  // namespace sb::gpu
