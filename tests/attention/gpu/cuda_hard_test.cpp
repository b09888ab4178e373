// What attention on CUDA has to survive: tensors of more than 2^31 elements, and numbers that are none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>

#include "attention/gpu/cuda_attention.h"
#include "tests/attention/gpu/cuda_case.h"
#include "tests/device/large_tensors.h"
#include "tests/device/software_device.h"

namespace sb {
namespace {

class CudaHard : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    stream_ = cuda::make_stream();
  }
  Exec exec(Arena* scratch = nullptr) {
    return {.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = scratch};
  }

  ThreadPool pool_{std::min(8, available_cores())};
  std::shared_ptr<void> stream_;
};

CudaAttentionOptions options_of(SelectionPattern pattern, SelectionOrder order = SelectionOrder::causal) {
  CudaAttentionOptions options;
  options.attention.layers = 1;
  options.attention.selection.pattern = pattern;
  options.attention.selection.order = order;
  options.attention.selection.score = BlockScore::moments;
  options.attention.selection.budget = test::sized(640, 300);
  options.attention.selection.vertical_cap = 200;
  options.attention.selection.slash_cap = 4;
  return options;
}

struct LargeRun {
  AttentionOperands operands;
  AttentionGradients gradients;
};

// 300 tokens behind the first 2^31 elements of the queries, packed with many before them, are what they are alone.
TEST_F(CudaHard, LastSequenceOfManyElementsIsWhatItIsAlone) {
  if (test::on_software_device()) GTEST_SKIP() << "2^31 elements would take a software device hours";
  struct Case {
    SelectionPattern pattern;
    int d;
    int64_t longest;
    bool portable = false;
  };
  constexpr int64_t kTail = 300;
  for (const Case& c : {Case{SelectionPattern::topk, 128, LargeTensors::kMany},
                        {SelectionPattern::dense, 64, 1900},
                        {SelectionPattern::window, 128, LargeTensors::kMany, true}}) {
    SCOPED_TRACE(fmt::format("pattern {} d{} portable {}", static_cast<int>(c.pattern), c.d, c.portable));
    const AttentionShape shape{64, 8, c.d, 0.1f};
    const int64_t tokens = LargeTensors::kMany / (shape.heads * c.d) + kTail;
    std::vector<int32_t> cu{0};
    while (cu.back() < tokens - kTail)
      cu.push_back(static_cast<int32_t>(std::min(tokens - kTail, cu.back() + c.longest)));
    cu.push_back(static_cast<int32_t>(tokens));
    CudaAttentionOptions options = options_of(c.pattern);
    options.portable = c.portable;
    const auto attention = make_cuda_attention(options);
    LargeTensors tensors(exec());
    const auto run = [&](const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& dout,
                         const std::vector<int32_t>& sequences) {
      const int64_t count = q.dim(0);
      LargeRun made{{q, k, v, tensors.zeros(DType::bf16, q.shape()), tensors.zeros(DType::f32, {shape.heads, count})},
                    {dout, tensors.zeros(DType::bf16, q.shape()), tensors.zeros(DType::bf16, k.shape()),
                     tensors.zeros(DType::bf16, k.shape())}};
      Arena scratch = make_arena("scratch", attention->scratch_bytes(shape, count, 1), DeviceKind::cuda);
      const auto state = attention->make_state();
      attention->forward(exec(&scratch), 0, shape, {sequences, {}}, made.operands, *state, false);
      attention->backward(exec(&scratch), 0, shape, {sequences, {}}, made.operands, made.gradients, *state);
      cuda::synchronize(stream_.get());
      return made;
    };
    const Shape wide{tokens, shape.heads, c.d}, narrow{tokens, shape.kv_heads, c.d};
    const LargeRun all = run(tensors.repeated(wide, 1), tensors.repeated(narrow, 2), tensors.repeated(narrow, 3),
                             tensors.repeated(wide, 4), cu);
    const auto last = [&](const TensorView& view) { return tensors.copy_of_last(view, kTail); };
    const LargeRun alone = run(last(all.operands.q), last(all.operands.k), last(all.operands.v),
                               last(all.gradients.dout), {0, static_cast<int32_t>(kTail)});
    const auto expect_last = [&](const TensorView& view, const TensorView& want, const char* what) {
      EXPECT_LT(difference(LargeTensors::host(last(view)), LargeTensors::host(want)), 2e-3) << what;
    };
    expect_last(all.operands.out, alone.operands.out, "out");
    expect_last(all.gradients.dq, alone.gradients.dq, "dq");
    expect_last(all.gradients.dk, alone.gradients.dk, "dk");
    expect_last(all.gradients.dv, alone.gradients.dv, "dv");
    for (const int head : {0, 63}) {
      const auto lse = [&](const LargeRun& of) {
        const TensorView line = of.operands.lse.rows(head, head + 1);
        return LargeTensors::host(last(line.reshaped({line.dim(1)})));
      };
      EXPECT_LT(difference(lse(all), lse(alone)), 1e-5) << "head " << head;
    }
  }
}

// Whatever a sequence holds, selecting and attending end, and the sequence behind it knows nothing of it.
TEST_F(CudaHard, NumbersThatAreNoneStayInTheirSequence) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  const AttentionShape shape{8, 2, 64, 0.125f};
  const auto cu = test::sized<std::vector<int32_t>>({0, 3000, 4500}, {0, 600, 900});
  const int64_t query = test::sized(1500, 500), key = test::sized(700, 250);
  const CudaOperands clean(shape, cu.back(), DType::bf16, 3);
  const int64_t wide_row = shape.heads * shape.head_dim, narrow_row = shape.kv_heads * shape.head_dim;
  struct Poison {
    const char* name;
    std::function<void(CudaOperands&)> spread;
  };
  const auto fill = [](std::vector<float>& x, int64_t begin, int64_t end, float value) {
    std::fill(x.begin() + begin, x.begin() + end, value);
  };
  const std::vector<Poison> poisons = {
      {"a query", [&](CudaOperands& in) { fill(in.q, query * wide_row, (query + 1) * wide_row, kNan); }},
      {"a key", [&](CudaOperands& in) { fill(in.k, key * narrow_row, (key + 1) * narrow_row, kNan); }},
      {"an infinite key", [&](CudaOperands& in) { fill(in.k, key * narrow_row, (key + 1) * narrow_row, kInfinity); }},
      {"all queries and keys",
       [&](CudaOperands& in) {
         fill(in.q, 0, cu[1] * wide_row, kNan);
         fill(in.k, 0, cu[1] * narrow_row, kNan);
       }},
      {"products beyond all numbers",
       [&](CudaOperands& in) {
         fill(in.q, 0, cu[1] * wide_row, 3e38f);
         fill(in.k, 0, cu[1] * narrow_row, -3e38f);
       }},
      {"equal scores", [&](CudaOperands& in) { fill(in.k, 0, cu[1] * narrow_row, 0.0f); }},
  };
  // Under the memory checker those that reach the most.
  const bool brief = std::getenv("SB_TEST_SHORT") != nullptr,
             software = test::smaller_on_software_device("portable kernels only with all queries and keys NaN");
  const Shape wide{clean.tokens, shape.heads, shape.head_dim}, narrow{clean.tokens, shape.kv_heads, shape.head_dim};
  using enum BlockScore;
  for (const auto& [pattern, order, score] : {std::tuple{SelectionPattern::topk, SelectionOrder::causal, moments},
                                              {SelectionPattern::topk, SelectionOrder::lookahead, moments},
                                              {SelectionPattern::topp, SelectionOrder::causal, moments},
                                              {SelectionPattern::mass, SelectionOrder::causal, moments},
                                              {SelectionPattern::mass, SelectionOrder::lookahead, moments},
                                              {SelectionPattern::topk, SelectionOrder::causal, planes},
                                              {SelectionPattern::mass, SelectionOrder::causal, planes},
                                              {SelectionPattern::vertical_slash, SelectionOrder::lookahead, moments}})
    for (const bool portable : {false, true}) {
      if (brief && portable) continue;
      const auto run = [&](const CudaOperands& in) {
        CudaAttentionOptions options = options_of(pattern, order);
        options.portable = portable;
        options.attention.coverage_rows = 3;
        options.attention.selection.score = score;
        const auto attention = make_cuda_attention(options);
        LearnedSelection learned;
        learned.planes.push_back(
            {16, std::vector<double>(2 * 64, 1.0), std::vector<double>(2 * 64, 0.0), std::vector<double>(2 * 64, 1.0)});
        attention->use(learned);
        const DeviceTensor q(in.q, wide, DType::bf16), k(in.k, narrow, DType::bf16), v(in.v, narrow, DType::bf16),
            dout(in.dout, wide, DType::bf16);
        DeviceTensor out(wide, DType::bf16), lse({shape.heads, in.tokens}, DType::f32), dq(wide, DType::bf16),
            dk(narrow, DType::bf16), dv(narrow, DType::bf16);
        Arena scratch = make_arena("scratch", attention->scratch_bytes(shape, in.tokens, 1), DeviceKind::cuda);
        const auto state = attention->make_state();
        const AttentionOperands operands{q.view(), k.view(), v.view(), out.view(), lse.view()};
        attention->forward(exec(&scratch), 0, shape, {cu, {}}, operands, *state, false);
        attention->backward(exec(&scratch), 0, shape, {cu, {}}, operands,
                            {dout.view(), dq.view(), dk.view(), dv.view()}, *state);
        cuda::synchronize(stream_.get());
        const BlockIndex index = read_block_index(*state, pool_);
        for (int64_t row = 0; row < index.rows(); ++row) {
          const auto blocks = index.row(row).blocks;
          EXPECT_TRUE(std::ranges::adjacent_find(blocks, std::greater_equal()) == blocks.end()) << "row " << row;
        }
        // Of the sequence behind.
        const auto second = [&](const DeviceTensor& of, int64_t row) {
          const std::vector<float> all = of.host();
          return std::vector<float>(all.begin() + cu[1] * row, all.end());
        };
        return CudaResults{
            second(out, wide_row), {}, second(dq, wide_row), second(dk, narrow_row), second(dv, narrow_row)};
      };
      const CudaResults want = run(clean);
      for (const Poison& poison : poisons) {
        if ((brief || (software && portable)) && poison.name != std::string("all queries and keys")) continue;
        SCOPED_TRACE(fmt::format("pattern {} order {} portable {}: {}", static_cast<int>(pattern),
                                 static_cast<int>(order), portable, poison.name));
        CudaOperands in = clean;
        poison.spread(in);
        const CudaResults got = run(in);
        EXPECT_EQ(got.out, want.out);
        EXPECT_LT(difference(got.dq, want.dq), 1e-3);
        EXPECT_LT(difference(got.dk, want.dk), 1e-3);
        EXPECT_LT(difference(got.dv, want.dv), 1e-3);
      }
    }
}

}  // namespace
}  // namespace sb
