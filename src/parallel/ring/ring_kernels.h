#pragma once

#include <cstdint>

#include "device/exec.h"

// What a ring of GPUs does besides attention itself. All of it is queued on exec.stream. `rows` are numbers of rows, in
// device memory; -1 stands for none.
namespace sb::gpu {

// Row i of `to` = row rows[i] of `from`, or zeros. Strides and widths in bytes, all of them multiples of 16.
struct GatherRows {
  const void* from;
  int64_t from_stride;
  void* to;
  int64_t to_stride;
  const int32_t* rows;
  int64_t count, width;
};
void gather_rows(const Exec& exec, const GatherRows& gather);

// Row rows[i] of `to` += row i of `from` [count, width], which has the type `dtype`; none twice. Strides in elements.
struct AddRows {
  const void* from;
  DType dtype;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  const int32_t* rows;
  int64_t count, width;
};
void add_rows(const Exec& exec, const AddRows& add);

// lse [heads, count] of the rows of `all` [heads, tokens], or -inf.
void gather_lse(const Exec& exec, const float* all, int64_t tokens, float* lse, const int32_t* rows, int64_t count,
                int heads);

// Merges a partial attention into what there is so far, by log-sum-exp in fp32: both are means under the softmax of
// their own keys.
struct MergeRows {
  const void* part;  // [count, heads, d] of the type `dtype`
  DType dtype;
  const float* part_lse;  // [heads, count]
  float* out;             // [tokens, heads, d]
  float* lse;             // [heads, tokens]
  const int32_t* rows;
  int64_t count, tokens;
  int heads, head_dim;
};
void merge_rows(const Exec& exec, const MergeRows& merge);

void fill(const Exec& exec, float* to, int64_t count, float value);
// to += from
void add_floats(const Exec& exec, const float* from, float* to, int64_t count);
// to = from, rounded to the type.
void convert_floats(const Exec& exec, const float* from, void* to, DType dtype, int64_t count);

}  // namespace sb::gpu
