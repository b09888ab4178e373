#include "ops/column_products.h"

#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

// x has `in` columns from `x_first` on of `x_width`, y `out` from `y_first` on of `y_width`.
struct ColumnSizes {
  int64_t rows, in, x_first, x_width, out, y_first, y_width;
};
const std::vector<ColumnSizes> kColumnSizes = {{1, 1, 0, 1, 1, 0, 1},
                                               {5, 3, 0, 3, 7, 0, 7},
                                               {9, 4, 2, 11, 5, 3, 8},
                                               {33, 16, 16, 48, 24, 8, 64},
                                               {70, 8, 0, 16, 130, 1, 131}};

class ColumnProductsTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(ColumnProductsTest);

TEST_P(ColumnProductsTest, MatchTheirDefinitionAndLeaveOtherColumnsAlone) {
  for (const ColumnSizes& s : kColumnSizes) {
    SCOPED_TRACE(::testing::Message() << s.rows << "x" << s.in << "x" << s.out);
    const auto x = random_operand(s.rows * s.x_width, 1), w = random_operand(s.out * s.in, 2),
               before = random_operand(s.rows * s.y_width, 3);
    for (const bool transposed : {true, false}) {
      for (const bool accumulate : {true, false}) {
        const float scale = accumulate ? 1.0f : 0.5f;
        std::vector<double> expected = doubles(before);
        for (int64_t t = 0; t < s.rows; ++t) {
          for (int64_t o = 0; o < s.out; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < s.in; ++i)
              sum += double{x[t * s.x_width + s.x_first + i]} * w[transposed ? o * s.in + i : i * s.out + o];
            double& to = expected[t * s.y_width + s.y_first + o];
            to = accumulate ? to + sum : double{scale} * sum;
          }
        }
        const TensorView y = tensor(before, {s.rows, s.y_width});
        const Columns from(tensor(x, {s.rows, s.x_width}), s.x_first, s.in), to(y, s.y_first, s.out);
        if (transposed)
          multiply_transposed(exec(), from, tensor(w, {s.out, s.in}), scale, to, accumulate);
        else
          multiply(exec(), from, tensor(w, {s.in, s.out}), scale, to, accumulate);
        expect_close(host(y), expected, tolerance(2e-6, 2), transposed ? "transposed" : "plain");
      }
    }
  }
}

TEST_P(ColumnProductsTest, OuterProducts) {
  for (const ColumnSizes& s : kColumnSizes) {
    const auto x = random_operand(s.rows * s.x_width, 1), dy = random_operand(s.rows * s.y_width, 2);
    const auto before = random_values(s.out * s.in, 3);
    for (const bool accumulate : {true, false}) {
      std::vector<double> expected;
      for (int64_t o = 0; o < s.out; ++o) {
        for (int64_t i = 0; i < s.in; ++i) {
          double sum = accumulate ? before[o * s.in + i] : 0.0;
          for (int64_t t = 0; t < s.rows; ++t)
            sum += double{dy[t * s.y_width + s.y_first + o]} * x[t * s.x_width + s.x_first + i];
          expected.push_back(sum);
        }
      }
      const TensorView gradient = floats(before, {s.out, s.in});
      add_outer_products(exec(), Columns(tensor(dy, {s.rows, s.y_width}), s.y_first, s.out),
                         Columns(tensor(x, {s.rows, s.x_width}), s.x_first, s.in), gradient, accumulate);
      expect_close(host(gradient), expected, 1e-5, "gradient");
    }
  }
}

}  // namespace
}  // namespace sb::test
