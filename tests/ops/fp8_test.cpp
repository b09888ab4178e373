#include "ops/fp8/fp8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "device/memory.h"
#include "ops/fp8/e4m3.h"
#include "ops/swiglu.h"
#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

// A code's magnitude in units of 2⁻⁹, which all of them are multiples of.
int units(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  return exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
}

bool is_number(int code) {
  return (code & 0x7f) != 0x7f;
}

TEST(E4m3, EveryCodeHasItsValueAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const auto own = static_cast<uint8_t>(code);
    const float value = float_from_e4m3(own);
    if (!is_number(code)) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(std::fabs(value) * 512, static_cast<float>(units(own))) << code;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    EXPECT_EQ(e4m3_from_float(value), own);
  }
}

TEST(E4m3, RoundsToTheNearestAndTiesToEven) {
  for (uint8_t code = 0; code < 0x7e; ++code) {
    const auto next = static_cast<uint8_t>(code + 1);
    const float middle = static_cast<float>(units(code) + units(next)) / 1024;  // exact
    for (const int sign : {0, 0x80}) {
      const auto rounded = [&](float magnitude) { return e4m3_from_float(sign != 0 ? -magnitude : magnitude); };
      EXPECT_EQ(rounded(middle), (code % 2 == 0 ? code : next) | sign) << int{code};
      EXPECT_EQ(rounded(std::nextafter(middle, 0.0f)), code | sign) << int{code};
      EXPECT_EQ(rounded(std::nextafter(middle, 1e9f)), next | sign) << int{code};
    }
  }
}

TEST(E4m3, WhatIsTooLargeTooSmallOrNoNumber) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float large : {448.0f, 460.0f, 464.0f, 480.0f, 1e30f, infinity}) {
    EXPECT_EQ(e4m3_from_float(large), 0x7e) << large;
    EXPECT_EQ(e4m3_from_float(-large), 0xfe) << large;
  }
  EXPECT_EQ(e4m3_from_float(1e-30f), 0);
  EXPECT_EQ(e4m3_from_float(-1e-30f), 0x80);
  EXPECT_EQ(e4m3_from_float(0x1p-10f), 0);  // half of the smallest: to even
  EXPECT_EQ(e4m3_from_float(NAN) & 0x7f, 0x7f);
}

class Fp8Test : public OpsTest {
 protected:
  // A matrix on the test's device, filled with what must not matter.
  Fp8Matrix matrix(int64_t rows, int64_t columns, Fp8Layout layout) {
    arenas_.push_back(make_arena("codes", std::max<int64_t>(64, fp8_bytes(rows, columns, layout)), GetParam().device));
    return fp8_allocate(arenas_.back(), rows, columns, layout);
  }
  std::vector<uint8_t> codes(const uint8_t* from, int64_t count) const {
    // Whole words.
    const std::vector<char> all =
        bytes(TensorView(const_cast<uint8_t*>(from), DType::i32, {count / 4}, GetParam().device));
    return {all.begin(), all.end()};
  }
  std::vector<float> scales(const Fp8Matrix& of) const {
    return {host(TensorView(of.largest, DType::f32, {1}, GetParam().device))[0],
            host(TensorView(of.worth, DType::f32, {1}, GetParam().device))[0]};
  }

 private:
  std::vector<Arena> arenas_;
};
SB_INSTANTIATE_ON_ALL_DEVICES(Fp8Test);

// By looking at all codes.
uint8_t nearest_code(float value) {
  int best = 0;
  for (int code = 0; code < 256; ++code) {
    if (!is_number(code) || (code >= 128) != std::signbit(value)) continue;
    if (std::signbit(value) && best < 128) best = code;
    const double away = std::fabs(double{value} - float_from_e4m3(static_cast<uint8_t>(code))),
                 least = std::fabs(double{value} - float_from_e4m3(static_cast<uint8_t>(best)));
    if (away < least || (away == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

TEST_P(Fp8Test, CodesInBothLayouts) {
  struct Contents {
    const char* name;
    double scale;
    float one;  // in place of an element; 0: none
  };
  for (const auto& [rows, columns] : {std::pair{1, 16}, {3, 48}, {64, 128}, {67, 144}}) {
    for (const Contents& contents :
         {Contents{"normal", 1, 0}, {"an outlier", 1, 1000}, {"tiny", 1e-37, 0}, {"large", 1e37, 0}, {"zero", 0, 0}}) {
      SCOPED_TRACE(::testing::Message() << contents.name << " " << rows << "x" << columns);
      const int64_t count = int64_t{rows} * columns, padded = fp8_padded(rows);
      std::vector<float> x = random_operand(count, 7, contents.scale);
      if (contents.one != 0) x[static_cast<size_t>(count / 2)] = contents.one;
      float largest = 0;
      for (const float value : x) largest = std::max(largest, std::fabs(value));
      const float reached = std::max(largest, 0x1p-100f);
      std::vector<uint8_t> by_row(x.size()), by_column(static_cast<size_t>(columns * padded));
      for (int64_t i = 0; i < count; ++i) {
        by_row[static_cast<size_t>(i)] = nearest_code(x[static_cast<size_t>(i)] * (448.0f / reached));
        by_column[static_cast<size_t>(i % columns * padded + i / columns)] = by_row[static_cast<size_t>(i)];
      }
      const TensorView values = tensor(x, {rows, columns});
      for (const Fp8Layout layout : {Fp8Layout::by_row, Fp8Layout::by_column, Fp8Layout::both}) {
        const Fp8Matrix rounded = matrix(rows, columns, layout);
        fp8_quantize(exec(), values, rounded);
        const std::vector<float> scale = scales(rounded);
        EXPECT_EQ(scale[0], largest);
        EXPECT_EQ(scale[1], reached / 448.0f);
        if (rounded.by_row) {
          EXPECT_EQ(codes(rounded.by_row, count), by_row);
        }
        if (rounded.by_column) {
          EXPECT_EQ(codes(rounded.by_column, columns * padded), by_column);
        }
      }
    }
  }
}

std::vector<double> values_of(const std::vector<uint8_t>& codes, float worth) {
  std::vector<double> values;
  for (const uint8_t code : codes) values.push_back(double{float_from_e4m3(code)} * worth);
  return values;
}

TEST_P(Fp8Test, ProductsAreThoseOfTheCodes) {
  struct Sizes {
    int64_t tokens, in, out;
  };
  for (const Sizes& s : {Sizes{1, 16, 16}, {3, 48, 32}, {67, 144, 272}, {130, 512, 64}}) {
    SCOPED_TRACE(::testing::Message() << s.tokens << "x" << s.in << "x" << s.out);
    const auto x = random_operand(s.tokens * s.in, 1), w = random_operand(s.out * s.in, 2, 0.05),
               dy = random_operand(s.tokens * s.out, 3, 1e-4), before = random_operand(s.tokens * s.out, 4);
    const Fp8Matrix of_x = matrix(s.tokens, s.in, Fp8Layout::both), of_w = matrix(s.out, s.in, Fp8Layout::both),
                    of_dy = matrix(s.tokens, s.out, Fp8Layout::both);
    fp8_quantize(exec(), tensor(x, {s.tokens, s.in}), of_x);
    fp8_quantize(exec(), tensor(w, {s.out, s.in}), of_w);
    fp8_quantize(exec(), tensor(dy, {s.tokens, s.out}), of_dy);
    const auto xq = values_of(codes(of_x.by_row, s.tokens * s.in), scales(of_x)[1]),
               wq = values_of(codes(of_w.by_row, s.out * s.in), scales(of_w)[1]),
               dq = values_of(codes(of_dy.by_row, s.tokens * s.out), scales(of_dy)[1]);
    // element(i, j) summed over `length`, and how far rounding the operands may move it.
    const auto expect = [&](const TensorView& got, const std::vector<double>& added, int64_t rows, int64_t columns,
                            int64_t length, const auto& product, const auto& exact, const char* what) {
      std::vector<double> expected;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          double sum = 0, unrounded = 0, most = 0;
          for (int64_t k = 0; k < length; ++k) {
            sum += product(i, j, k);
            unrounded += exact(i, j, k);
            most += std::fabs(exact(i, j, k));
          }
          // 2⁻⁴ of each operand, and what is below the smallest normal code.
          EXPECT_LE(std::fabs(sum - unrounded), 0.14 * most + 1e-12) << what;
          expected.push_back(sum + (added.empty() ? 0 : added[static_cast<size_t>(i * columns + j)]));
        }
      }
      // The tensor cores sum fewer bits than fp32 has before they hand over.
      expect_close(host(got), expected, tolerance(on_cuda() ? 2e-3 : 2e-6, 2), what);
    };
    const auto at = [](const auto& m, int64_t i) { return double{m[static_cast<size_t>(i)]}; };

    const TensorView y = filled({s.tokens, s.out}, NAN);
    fp8_multiply(exec(), fp8_rows(of_x), fp8_rows(of_w), {}, tensor(before, {s.tokens, s.out}), y);
    expect(
        y, doubles(before), s.tokens, s.out, s.in,
        [&](int64_t i, int64_t j, int64_t k) { return at(xq, i * s.in + k) * at(wq, j * s.in + k); },
        [&](int64_t i, int64_t j, int64_t k) { return at(x, i * s.in + k) * at(w, j * s.in + k); }, "y");
    const TensorView dx = filled({s.tokens, s.in}, NAN);
    fp8_multiply(exec(), fp8_rows(of_dy), fp8_columns(of_w), {}, {}, dx);
    expect(
        dx, {}, s.tokens, s.in, s.out,
        [&](int64_t i, int64_t j, int64_t k) { return at(dq, i * s.out + k) * at(wq, k * s.in + j); },
        [&](int64_t i, int64_t j, int64_t k) { return at(dy, i * s.out + k) * at(w, k * s.in + j); }, "dx");
    const TensorView dw = filled_f32({s.out, s.in}, 2.5e-4f);
    fp8_multiply(exec(), fp8_columns(of_dy), fp8_columns(of_x), {}, dw, dw);
    expect(
        dw, std::vector<double>(static_cast<size_t>(s.out * s.in), double{2.5e-4f}), s.out, s.in, s.tokens,
        [&](int64_t i, int64_t j, int64_t k) { return at(dq, k * s.out + i) * at(xq, k * s.in + j); },
        [&](int64_t i, int64_t j, int64_t k) { return at(dy, k * s.out + i) * at(x, k * s.in + j); }, "dw");
  }
}

TEST_P(Fp8Test, BiasIsAddedToEveryRow) {
  if (on_cuda() && dtype() == DType::f32) GTEST_SKIP() << "cuBLASLt has no such product; no run has one";
  const TensorView x = filled({5, 16}, 1.0f), w = filled({32, 16}, 0.5f);
  const std::vector<float> bias = random_operand(32, 1);
  const Fp8Matrix of_x = matrix(5, 16, Fp8Layout::by_row), of_w = matrix(32, 16, Fp8Layout::by_row);
  fp8_quantize(exec(), x, of_x);
  fp8_quantize(exec(), w, of_w);
  const TensorView y = filled({5, 32}, NAN);
  fp8_multiply(exec(), fp8_rows(of_x), fp8_rows(of_w), tensor(bias, {32}), {}, y);
  std::vector<double> expected;
  for (int i = 0; i < 5 * 32; ++i) expected.push_back(8.0 + bias[static_cast<size_t>(i % 32)]);
  expect_close(host(y), expected, tolerance(1e-6), "bias");
}

TEST_P(Fp8Test, SwigluNotesWhatQuantizeWouldFind) {
  if (!on_cuda()) GTEST_SKIP() << "on CUDA alone";
  constexpr int64_t kRows = 33, kWidth = 1056;
  const auto largest = [&](const TensorView& of) {
    float most = 0;
    for (const float value : host(of)) most = std::max(most, std::fabs(value));
    return most;
  };
  const TensorView gate_up = tensor(random_operand(kRows * 2 * kWidth, 1), {kRows, 2 * kWidth}),
                   h = filled({kRows, kWidth}, 0), noted = filled_f32({1}, 0);
  swiglu_forward(exec(), gate_up, h, noted);
  EXPECT_EQ(host(noted)[0], largest(h));
  const Fp8Matrix found = matrix(kRows, kWidth, Fp8Layout::both), known = matrix(kRows, kWidth, Fp8Layout::both);
  fp8_quantize(exec(), h, found);
  fp8_quantize(exec(), h, known, noted);
  EXPECT_EQ(scales(known), scales(found));
  EXPECT_EQ(codes(known.by_row, kRows * kWidth), codes(found.by_row, kRows * kWidth));
  const int64_t all = kWidth * fp8_padded(kRows);
  EXPECT_EQ(codes(known.by_column, all), codes(found.by_column, all));
}

TEST_P(Fp8Test, SwigluBackwardInCodesIsThatOfBothSteps) {
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 16}, {37, 144}, {130, 1056}}) {
    SCOPED_TRACE(::testing::Message() << rows << "x" << width);
    const TensorView gate_up = tensor(random_operand(rows * 2 * width, 1), {rows, 2 * width}),
                     dh = tensor(random_operand(rows * width, 2, 1e-3), {rows, width}),
                     dgate_up = filled({rows, 2 * width}, 0), h = filled({rows, width}, 0);
    swiglu_backward(exec(), gate_up, dh, dgate_up, h);
    const Fp8Matrix of_dgate_up = matrix(rows, 2 * width, Fp8Layout::both),
                    of_h = matrix(rows, width, Fp8Layout::by_column),
                    got_dgate_up = matrix(rows, 2 * width, Fp8Layout::both),
                    got_h = matrix(rows, width, Fp8Layout::by_column);
    fp8_quantize(exec(), dgate_up, of_dgate_up);
    fp8_quantize(exec(), h, of_h);
    fp8_swiglu_backward(exec(), gate_up, dh, got_dgate_up, got_h);
    EXPECT_EQ(scales(got_dgate_up), scales(of_dgate_up));
    EXPECT_EQ(scales(got_h), scales(of_h));
    const int64_t padded = fp8_padded(rows);
    EXPECT_EQ(codes(got_dgate_up.by_row, rows * 2 * width), codes(of_dgate_up.by_row, rows * 2 * width));
    EXPECT_EQ(codes(got_dgate_up.by_column, 2 * width * padded), codes(of_dgate_up.by_column, 2 * width * padded));
    EXPECT_EQ(codes(got_h.by_column, width * padded), codes(of_h.by_column, width * padded));
  }
}

TEST_P(Fp8Test, NoRowsAndWhatIsNotFinite) {
  const Fp8Matrix none = matrix(0, 32, Fp8Layout::both), also_none = matrix(0, 16, Fp8Layout::both);
  fp8_quantize(exec(), filled({0, 32}, 0), none);
  fp8_quantize(exec(), filled({0, 16}, 0), also_none);
  const TensorView d = filled_f32({32, 16}, 3.0f);
  fp8_multiply(exec(), fp8_columns(none), fp8_columns(also_none), {}, d, d);
  EXPECT_EQ(host(d), std::vector<float>(32 * 16, 3.0f));
  fp8_multiply(exec(), fp8_columns(none), fp8_columns(also_none), {}, {}, d);
  EXPECT_EQ(host(d), std::vector<float>(32 * 16, 0.0f));

  for (const float bad : {NAN, std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = random_operand(16 * 16, 1);
    x[37] = bad;
    const Fp8Matrix of_x = matrix(16, 16, Fp8Layout::by_row);
    fp8_quantize(exec(), tensor(x, {16, 16}), of_x);
    const TensorView y = filled({16, 16}, 0);
    fp8_multiply(exec(), fp8_rows(of_x), fp8_rows(of_x), {}, {}, y);
    EXPECT_FALSE(std::isfinite(host(y)[37 / 16 * 16 + 37 / 16])) << bad;
  }
}

}  // namespace
}  // namespace sb::test
