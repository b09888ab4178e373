#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/gpu/cuda_attention.h"
#include "tests/attention/gpu/cuda_case.h"
#include "tests/device/software_device.h"

namespace sb {

using test::sized;

// Attention on a GPU, and on the CPU to compare with.
class CudaAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    stream_ = cuda::make_stream();
  }

  Exec cpu_exec() { return {.pool = &pool_, .scratch = &cpu_scratch_}; }

  // Forward and backward on the device; the lists in `index`.
  CudaResults run(SelectingAttention& attention, const CudaOperands& in, const PackedSequences& sequences, DType dtype,
                  BlockIndex* index = nullptr, int layer = 0) {
    const int d = in.shape.head_dim;
    const Shape wide{in.tokens, in.shape.heads, d}, narrow{in.tokens, in.shape.kv_heads, d};
    const DeviceTensor q(in.q, wide, dtype), k(in.k, narrow, dtype), v(in.v, narrow, dtype), dout(in.dout, wide, dtype);
    DeviceTensor out(wide, dtype), lse({in.shape.heads, in.tokens}, DType::f32), dq(wide, dtype), dk(narrow, dtype),
        dv(narrow, dtype);
    Arena scratch = make_arena("scratch", attention.scratch_bytes(in.shape, in.tokens, 1), DeviceKind::cuda);
    const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch};
    const auto state = attention.make_state();
    const AttentionOperands operands{q.view(), k.view(), v.view(), out.view(), lse.view()};
    attention.forward(exec, layer, in.shape, sequences, operands, *state, false);
    attention.backward(exec, layer, in.shape, sequences, operands, {dout.view(), dq.view(), dk.view(), dv.view()},
                       *state);
    cuda::synchronize(stream_.get());
    EXPECT_EQ(scratch.used(), 0);
    if (index != nullptr) *index = read_block_index(*state, pool_);
    CudaResults results{out.host(), lse.host(), dq.host(), dk.host(), dv.host()};
    // The same selections again give the same.
    attention.forward(exec, layer, in.shape, sequences, operands, *state, true);
    cuda::synchronize(stream_.get());
    EXPECT_EQ(out.host(), results.out);
    return results;
  }

  BlockIndex selected_by_cpu(const CudaAttentionOptions& options, const CudaOperands& in,
                             const std::vector<int32_t>& cu, const LearnedSelection& learned = {}) {
    SparseAttention cpu(options.attention);
    return run_on_cpu(cpu, in, cu, learned);
  }
  BlockIndex run_on_cpu(SparseAttention& cpu, const CudaOperands& in, const std::vector<int32_t>& cu,
                        const LearnedSelection& learned, int layer = 0) {
    cpu.use(learned);
    const auto state = cpu.make_state();
    CudaResults r;
    r.out.resize(in.q.size());
    r.lse.resize(in.shape.heads * in.tokens);
    const Exec exec = cpu_exec();
    const Shape wide{in.tokens, in.shape.heads, in.shape.head_dim},
        narrow{in.tokens, in.shape.kv_heads, in.shape.head_dim};
    cpu.forward(exec, layer, in.shape, {cu, {}},
                {{in.q.data(), wide},
                 {in.k.data(), narrow},
                 {in.v.data(), narrow},
                 {r.out.data(), wide},
                 {r.lse.data(), {in.shape.heads, in.tokens}}},
                *state, false);
    return SparseAttention::index(*state);
  }

  std::shared_ptr<void> stream_;
  ThreadPool pool_{std::min(8, available_cores())};
  Arena cpu_scratch_{"cpu", 256 << 20};
};

inline CudaAttentionOptions options_of(SelectionPattern pattern, int64_t budget) {
  CudaAttentionOptions options;
  options.attention.layers = 3;
  options.attention.selection.pattern = pattern;
  options.attention.selection.score = BlockScore::moments;
  options.attention.selection.budget = budget;
  options.attention.selection.dense_layers = {2};
  return options;
}

inline CudaAttentionOptions planes_options(SelectionPattern pattern, int64_t budget) {
  CudaAttentionOptions options = options_of(pattern, budget);
  options.attention.selection.score = BlockScore::planes;
  return options;
}

// Energies that make every layer and head take other planes.
inline LearnedSelection made_up_energies(const AttentionShape& shape, int layers) {
  LearnedSelection learned;
  const size_t width = static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(shape.head_dim);
  for (int layer = 0; layer < layers; ++layer) {
    PlaneSums& sums = learned.planes.emplace_back();
    sums.tokens = 16;
    for (size_t i = 0; i < width; ++i)
      sums.query_squares.push_back(1.0 + static_cast<double>((i * 37 + 5 * layer) % 101));
    sums.key_sums.assign(width, 0.0);
    sums.key_squares.assign(width, 16.0);
  }
  return learned;
}

}  // namespace sb
