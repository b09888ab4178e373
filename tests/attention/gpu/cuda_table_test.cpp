#include <gtest/gtest.h>

#include <algorithm>

#include "attention/gpu/cuda_attention.h"
#include "tests/attention/gpu/cuda_case.h"
#include "tests/attention/sparse_cases.h"
#include "tests/device/software_device.h"

namespace sb {
namespace {

// Every case of the CPU's table on the device, with the lists given: in fp32, and in bf16 on the kernels that take it.
class CudaTable : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    stream_ = cuda::make_stream();
    scratch_ = make_arena("scratch", int64_t{256} << 20, DeviceKind::cuda);
  }

  CudaResults run(const CudaAttentionOptions& options, const CudaOperands& in, const AttentionCase& c,
                  const BlockIndex& index, DType dtype) {
    const auto attention = make_cuda_attention(options);
    const Shape wide{in.tokens, in.shape.heads, in.shape.head_dim},
        narrow{in.tokens, in.shape.kv_heads, in.shape.head_dim};
    const DeviceTensor q(in.q, wide, dtype), k(in.k, narrow, dtype), v(in.v, narrow, dtype), dout(in.dout, wide, dtype);
    DeviceTensor out(wide, dtype), lse({in.shape.heads, in.tokens}, DType::f32), dq(wide, dtype), dk(narrow, dtype),
        dv(narrow, dtype);
    const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch_};
    const auto state = attention->make_state();
    const AttentionOperands operands{q.view(), k.view(), v.view(), out.view(), lse.view()};
    write_block_index(index, *attention, exec, in.shape, dtype, *state);
    EXPECT_TRUE(read_block_index(*state, pool_) == index) << "not what was written";
    attention->forward(exec, 0, in.shape, c.sequences(), operands, *state, true);
    attention->backward(exec, 0, in.shape, c.sequences(), operands, {dout.view(), dq.view(), dk.view(), dv.view()},
                        *state);
    cuda::synchronize(stream_.get());
    return {out.host(), lse.host(), dq.host(), dk.host(), dv.host()};
  }

  std::shared_ptr<void> stream_;
  ThreadPool pool_{std::min(8, available_cores())};
  Arena cpu_scratch_{"cpu", 256 << 20};
  Arena scratch_{"none", 0};
};

TEST_F(CudaTable, EveryCaseOfTheCpu) {
  int hopper = 0, portable = 0, refused = 0;
  for (const SparseCase& one : sparse_cases()) {
    const AttentionCase c = one.operands();
    const BlockIndex index = one.index(c);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const CudaOperands in(c.shape, c.tokens(), dtype, c.q, c.k, c.v, c.dout);
      const Exec exec{.pool = &pool_, .scratch = &cpu_scratch_};
      const CudaResults want = on_cpu(exec, in, index);
      for (const int kind : {0, 1, 2}) {
        if (kind > 0 && dtype == DType::f32) continue;
        CudaAttentionOptions options;
        options.attention.layers = 1;
        options.attention.selection.pattern = SelectionPattern::dense;
        options.portable = kind == 1;
        options.deterministic = kind == 2;
        SCOPED_TRACE(one.name + " " + std::string(dtype_name(dtype)) + " kind " + std::to_string(kind));
        const int d = c.shape.head_dim;
        if (dtype == DType::bf16 && (d % 16 != 0 || d == 80 || d > 128)) {
          EXPECT_THROW(run(options, in, c, index, dtype), UserError);
          scratch_.release(0);
          ++refused;
          continue;
        }
        expect_close(run(options, in, c, index, dtype), want, dtype);
        ++(kind == 1 || dtype == DType::f32 ? portable : hopper);
      }
    }
  }
  std::printf("%d runs with the kernels chosen for the GPU, %d with the portable ones, %d refused\n", hopper, portable,
              refused);
}

// Single keys beside blocks in the shapes that the Hopper kernels take: the table above has mostly others. Results in
// deterministic mode must be the same bits again.
TEST_F(CudaTable, GatheredColumns) {
  const auto some_keys = [](Random& random, int key) { return key % 5 == 2 || random.below(40) == 0; };
  const RowMaker beside_blocks = {
      [](Random& random, int, int, int block, int own) { return block == own || random.below(3) == 0 ? 0 : -1; },
      some_keys};
  // Keys of the query blocks' own tokens too.
  const RowMaker alone = {[](Random&, int, int, int, int) { return -1; }, some_keys};
  const RowMaker rarely = {[](Random& random, int, int, int, int) { return random.below(9) == 0 ? 0 : -1; },
                           [](Random& random, int) { return random.below(300) == 0; }};
  // Half of the rows list block 0 as a block, whose column is long enough to be split, the others its keys.
  const RowMaker hub = {
      [](Random&, int row, int, int block, int own) { return block == own || (block == 0 && row % 2 == 0) ? 0 : -1; },
      some_keys};
  const std::pair<const char*, const RowMaker*> makers[] = {
      {"beside blocks", &beside_blocks}, {"alone", &alone}, {"rarely", &rarely}, {"hub", &hub}};
  struct Lists {
    int heads, kv_heads, list_heads, block, query_block;
  };
  for (const Lists& lists :
       {Lists{4, 2, 4, 128, 128}, Lists{8, 1, 8, 256, 128}, Lists{4, 2, 2, 128, 16}, Lists{4, 2, 2, 64, 16},
        Lists{6, 2, 6, 64, 64}, Lists{14, 2, 2, 64, 32}, Lists{66, 1, 1, 128, 16}})
    for (const int d : {64, 128}) {
      const std::vector<int32_t> lengths = lists.heads > 8 ? std::vector<int32_t>{333, 1, 0, 129}
                                                           : std::vector<int32_t>{test::sized(1100, 400), 1, 0, 129};
      const AttentionCase c(shape_of(lists.heads, lists.kv_heads, d), lengths, 11);
      const CudaOperands in(c.shape, c.tokens(), DType::bf16, c.q, c.k, c.v, c.dout);
      for (const auto& [name, maker] : makers) {
        const BlockIndex index = build_index(c, {lists.block, lists.query_block, lists.list_heads}, *maker);
        const CudaResults want = on_cpu({.pool = &pool_, .scratch = &cpu_scratch_}, in, index);
        for (const bool deterministic : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {}:{} {} lists of {} x {} d{} deterministic {}", name, lists.heads,
                                   lists.kv_heads, lists.list_heads, lists.query_block, lists.block, d, deterministic));
          CudaAttentionOptions options;
          options.attention.layers = 1;
          options.attention.selection.pattern = SelectionPattern::dense;
          options.deterministic = deterministic;
          const CudaResults got = run(options, in, c, index, DType::bf16);
          expect_close(got, want, DType::bf16);
          if (!deterministic && lists.heads != 4) continue;
          const CudaResults again = run(options, in, c, index, DType::bf16);
          EXPECT_EQ(got.out, again.out);
          EXPECT_EQ(got.lse, again.lse);
          EXPECT_EQ(got.dk, again.dk);
          EXPECT_EQ(got.dv, again.dv);
          if (deterministic) {
            EXPECT_EQ(got.dq, again.dq);
          }
        }
      }
    }
}

// Query blocks of an odd number of tokens, which fill half of a tile.
TEST_F(CudaTable, OddQueryBlocks) {
  struct Lists {
    int heads, kv_heads, list_heads, block, query_block;
  };
  for (const Lists& lists : {Lists{4, 2, 2, 128, 1}, Lists{4, 2, 4, 128, 7}, Lists{14, 2, 2, 256, 5},
                             Lists{8, 1, 1, 128, 3}, Lists{2, 1, 2, 128, 127}, Lists{8, 2, 2, 128, 45}})
    for (const int d : {64, 128}) {
      const AttentionCase c(shape_of(lists.heads, lists.kv_heads, d), {500, 1, 0, 129, 260}, 12);
      const BlockIndex index =
          build_index(c, {lists.block, lists.query_block, lists.list_heads}, kRandomRows, {0, 0, 0, 1, 0});
      const CudaOperands in(c.shape, c.tokens(), DType::bf16, c.q, c.k, c.v, c.dout);
      const CudaResults want = on_cpu({.pool = &pool_, .scratch = &cpu_scratch_}, in, index);
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(fmt::format("{}:{} {} lists of {} x {} d{} deterministic {}", lists.heads, lists.kv_heads,
                                 lists.list_heads, lists.query_block, lists.block, d, deterministic));
        CudaAttentionOptions options;
        options.attention.layers = 1;
        options.attention.selection.pattern = SelectionPattern::dense;
        options.deterministic = deterministic;
        expect_close(run(options, in, c, index, DType::bf16), want, DType::bf16);
      }
    }
}

}  // namespace
}  // namespace sb
