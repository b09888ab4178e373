// Tensors of more than 2^31 elements, which 256K tokens of a wide model have: their last rows are what they are alone,
// and sums over all rows hold every one.
#include <gtest/gtest.h>

#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "tests/device/large_tensors.h"
#include "tests/device/software_device.h"
#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

constexpr int64_t kMany = LargeTensors::kMany, kPeriod = LargeTensors::kPeriod;
constexpr int64_t kTail = 77;  // rows behind the first 2^31 elements

class CudaLarge : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    if (test::on_software_device()) GTEST_SKIP() << "2^31 elements would take a software device hours";
    context_ = std::make_unique<DeviceContext>(DeviceKind::cuda, pool_, int64_t{1} << 26);
    tensors_ = std::make_unique<LargeTensors>(context_->exec());
  }
  const Exec& exec() const { return context_->exec(); }
  LargeTensors& tensors() { return *tensors_; }
  TensorView zeros(DType dtype, Shape shape) { return tensors_->zeros(dtype, shape); }
  TensorView random(Shape shape, uint64_t seed) { return tensors_->random(shape, seed); }
  TensorView repeated(int64_t rows, int64_t width, uint64_t seed) { return tensors_->repeated({rows, width}, seed); }
  TensorView alone(const TensorView& view) { return tensors_->copy_of_last(view, kTail); }

  // The last rows of a result, and the same from the last rows of its operands alone.
  static void expect_last(const TensorView& all, const TensorView& of_last, const char* what, double tolerance = 0) {
    const std::vector<float> got = LargeTensors::host(all.rows(all.dim(0) - kTail, all.dim(0))),
                             want = LargeTensors::host(of_last);
    EXPECT_NE(want.back(), 0) << what;
    if (tolerance > 0)
      expect_close(got, doubles(want), tolerance, what);
    else
      EXPECT_EQ(got, want) << what;
  }
  // A sum over all rows: of whole periods, and of what is left.
  static void expect_sum(const TensorView& all, const TensorView& period, const TensorView& rest, int64_t rows,
                         const char* what) {
    const std::vector<float> once = LargeTensors::host(period), left = LargeTensors::host(rest);
    std::vector<double> want;
    for (size_t i = 0; i < once.size(); ++i)
      want.push_back(static_cast<double>(rows / kPeriod) * once[i] + static_cast<double>(left[i]));
    expect_close(LargeTensors::host(all), want, 2e-3, what);
  }

 private:
  ThreadPool pool_{2};
  std::unique_ptr<DeviceContext> context_;
  std::unique_ptr<LargeTensors> tensors_;
};

TEST_F(CudaLarge, RmsNorm) {
  constexpr int64_t kWidth = 4096, kRows = kMany / kWidth + kTail;
  const TensorView x = repeated(kRows, kWidth, 1), dy = repeated(kRows, kWidth, 2), weight = random({kWidth}, 3);
  const TensorView y = zeros(DType::bf16, {kRows, kWidth}), rstd = zeros(DType::f32, {kRows});
  const TensorView dweight = zeros(DType::f32, {kWidth});
  rmsnorm_forward(exec(), x, weight, 1e-6f, y, rstd);
  const TensorView last_x = alone(x), last_y = zeros(DType::bf16, last_x.shape()),
                   last_rstd = zeros(DType::f32, {kTail});
  rmsnorm_forward(exec(), last_x, weight, 1e-6f, last_y, last_rstd);
  expect_last(y, last_y, "y");
  expect_last(rstd, last_rstd, "rstd");

  const TensorView last_dx = alone(dy), ignored = zeros(DType::f32, {kWidth});
  rmsnorm_backward(exec(), last_x, weight, last_rstd, last_dx, last_dx, false, ignored);
  const TensorView period = zeros(DType::f32, {kWidth}), rest = zeros(DType::f32, {kWidth});
  for (const auto& [rows, sum] : {std::pair{kPeriod, period}, {kRows % kPeriod, rest}})
    rmsnorm_backward(exec(), x.rows(0, rows), weight, rstd.rows(0, rows), dy.rows(0, rows), y.rows(0, rows), false,
                     sum);
  rmsnorm_backward(exec(), x, weight, rstd, dy, dy, false, dweight);
  expect_last(dy, last_dx, "dx");
  expect_sum(dweight, period, rest, kRows, "dweight");
}

TEST_F(CudaLarge, SwiGlu) {
  constexpr int64_t kInner = 4096, kRows = kMany / (2 * kInner) + kTail;
  const TensorView gate_up = repeated(kRows, 2 * kInner, 1), h = zeros(DType::bf16, {kRows, kInner});
  const TensorView last = alone(gate_up), last_h = zeros(DType::bf16, {kTail, kInner});
  swiglu_forward(exec(), gate_up, h);
  swiglu_forward(exec(), last, last_h);
  expect_last(h, last_h, "h");
  swiglu_backward(exec(), gate_up, h, gate_up);
  swiglu_backward(exec(), last, last_h, last);
  expect_last(gate_up, last, "dgate_up");
}

TEST_F(CudaLarge, QkvRope) {
  const QkvShape shape{64, 8, 128};
  const int64_t rows = kMany / shape.width() + kTail;
  constexpr int kPositions = 5003;
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < rows; ++t) positions.push_back(static_cast<int32_t>(t % kPositions));
  const TensorView at = tensors().placed(positions, DType::i32, {rows}), last_at = alone(at);
  const TensorView cos = tensors().placed(random_values(kPositions * 64, 4, 1.0), DType::f32, {kPositions, 64}),
                   sin = tensors().placed(random_values(kPositions * 64, 5, 1.0), DType::f32, {kPositions, 64});
  const TensorView qkv = repeated(rows, shape.width(), 1), last_qkv = alone(qkv);
  struct Split {
    TensorView q, k, v, rstd_q, rstd_k, gradient;
  };
  const auto split = [&](int64_t count) {
    return Split{zeros(DType::bf16, {count, 64, 128}), zeros(DType::bf16, {count, 8, 128}),
                 zeros(DType::bf16, {count, 8, 128}),  zeros(DType::f32, {count, 64}),
                 zeros(DType::f32, {count, 8}),        zeros(DType::bf16, {count, shape.width()})};
  };
  const Split all = split(rows), last = split(kTail);
  for (const bool norms : {false, true}) {
    SCOPED_TRACE(norms ? "norms" : "no norms");
    const TensorView q_norm = norms ? random({128}, 6) : TensorView(), k_norm = norms ? random({128}, 7) : TensorView();
    const TensorView dq_norm = norms ? zeros(DType::f32, {128}) : TensorView(),
                     dk_norm = norms ? zeros(DType::f32, {128}) : TensorView();
    for (const auto& [own, from, where] : {std::tuple{&all, qkv, at}, {&last, last_qkv, last_at}}) {
      const TensorView rstd_q = norms ? own->rstd_q : TensorView(), rstd_k = norms ? own->rstd_k : TensorView();
      qkv_rope_forward(exec(), shape, from, where, cos, sin, q_norm, k_norm, 1e-6f, own->q, own->k, own->v, rstd_q,
                       rstd_k);
      qkv_rope_backward(exec(), shape, own->q, own->k, own->v, where, cos, sin, norms ? from : TensorView(), q_norm,
                        k_norm, rstd_q, rstd_k, own->gradient, dq_norm, dk_norm);
    }
    expect_last(all.q, last.q, "q");
    expect_last(all.k, last.k, "k");
    expect_last(all.v, last.v, "v");
    expect_last(all.gradient, last.gradient, "dqkv");
  }
}

// The widest matrix as a result, as either operand, and summed over.
TEST_F(CudaLarge, Linear) {
  constexpr int64_t kIn = 64, kOut = 8192, kRows = kMany / kOut + kTail;
  const TensorView x = repeated(kRows, kIn, 1), weight = random({kOut, kIn}, 2);
  const TensorView y = zeros(DType::bf16, {kRows, kOut}), dx = zeros(DType::bf16, {kRows, kIn});
  const TensorView last_x = alone(x), last_y = zeros(DType::bf16, {kTail, kOut}),
                   last_dx = zeros(DType::bf16, {kTail, kIn});
  linear_forward(exec(), x, weight, {}, y);
  linear_forward(exec(), last_x, weight, {}, last_y);
  expect_last(y, last_y, "y", 0x1p-7);
  linear_backward_input(exec(), y, weight, dx);
  linear_backward_input(exec(), last_y, weight, last_dx);
  expect_last(dx, last_dx, "dx", 0x1p-7);
  const TensorView dweight = zeros(DType::f32, {kOut, kIn}), period = zeros(DType::f32, {kOut, kIn}),
                   rest = zeros(DType::f32, {kOut, kIn});
  linear_backward_weight(exec(), x, y, dweight, {});
  for (const auto& [rows, sum] : {std::pair{kPeriod, period}, {kRows % kPeriod, rest}})
    linear_backward_weight(exec(), x.rows(0, rows), y.rows(0, rows), sum, {});
  expect_sum(dweight, period, rest, kRows, "dweight");
}

TEST_F(CudaLarge, Embedding) {
  constexpr int64_t kWidth = 8192, kRows = kMany / kWidth + kTail, kVocabulary = 300;
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kRows; ++t) ids.push_back(static_cast<int32_t>(t % kPeriod * 7 % kVocabulary));
  const TensorView tokens = tensors().placed(ids, DType::i32, {kRows}), table = random({kVocabulary, kWidth}, 1);
  const TensorView x = zeros(DType::bf16, {kRows, kWidth}), last_x = zeros(DType::bf16, {kTail, kWidth});
  embedding_forward(exec(), tokens, table, x);
  embedding_forward(exec(), alone(tokens), table, last_x);
  expect_last(x, last_x, "x");
  const TensorView dtable = zeros(DType::f32, {kVocabulary, kWidth}), period = zeros(DType::f32, dtable.shape()),
                   rest = zeros(DType::f32, dtable.shape());
  embedding_backward(exec(), tokens, x, dtable);
  for (const auto& [rows, sum] : {std::pair{kPeriod, period}, {kRows % kPeriod, rest}})
    embedding_backward(exec(), tokens.rows(0, rows), x.rows(0, rows), sum);
  expect_sum(dtable, period, rest, kRows, "dtable");
}

}  // namespace
}  // namespace sb::test
