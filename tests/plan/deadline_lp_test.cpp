#include "plan/tuning/deadline_lp.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/random.h"

namespace sb {
namespace {

struct Rows {
  std::vector<std::vector<double>> coefficients;
  std::vector<double> limits;
};

// Feasible, and equal to the value of its own dual: no better x can exist.
void expect_optimal(const DeadlineLp& lp, const std::vector<double>& gain, const Rows& rows) {
  double primal = 0, dual = 0;
  for (size_t j = 0; j < gain.size(); ++j) {
    const double x = lp.x(static_cast<int>(j));
    EXPECT_GE(x, -1e-7);
    EXPECT_LE(x, 1 + 1e-7);
    primal += gain[j] * x;
    double reduced = gain[j];
    for (size_t r = 0; r < rows.limits.size(); ++r) reduced -= lp.price(static_cast<int>(r)) * rows.coefficients[r][j];
    dual += std::max(0.0, reduced);
  }
  double price = 0;
  for (size_t r = 0; r < rows.limits.size(); ++r) {
    double used = 0;
    for (size_t j = 0; j < gain.size(); ++j) used += rows.coefficients[r][j] * lp.x(static_cast<int>(j));
    EXPECT_LE(used, rows.limits[r] + 1e-6);
    EXPECT_GE(lp.price(static_cast<int>(r)), -1e-9);
    price += lp.price(static_cast<int>(r));
    dual += lp.price(static_cast<int>(r)) * rows.limits[r];
  }
  EXPECT_NEAR(primal, dual, 1e-6 * std::max(1.0, std::abs(dual)));
  EXPECT_NEAR(lp.objective(), primal, 1e-7 * std::max(1.0, primal));
  EXPECT_NEAR(lp.price(), price, 1e-9 * std::max(1.0, price));
}

TEST(DeadlineLp, OneRowIsTheFractionalKnapsack) {
  const std::vector<double> gain{6, 10, 12}, weight{1, 2, 3};
  DeadlineLp lp(gain);
  EXPECT_TRUE(lp.solve());
  EXPECT_DOUBLE_EQ(lp.objective(), 28);
  lp.add_row(weight, 5);
  EXPECT_TRUE(lp.solve());
  EXPECT_NEAR(lp.objective(), 6 + 10 + 12 * 2.0 / 3, 1e-12);
  EXPECT_NEAR(lp.price(), 4, 1e-12);
}

TEST(DeadlineLp, RowsAndLimitsMayChange) {
  Random random(2);
  for (int trial = 0; trial < 100; ++trial) {
    const size_t n = 5 + random.below(40);
    std::vector<double> gain(n);
    for (double& g : gain) g = random.uniform();
    DeadlineLp lp(gain);
    Rows rows;
    const size_t count = 1 + random.below(10);
    for (size_t r = 0; r < count; ++r) {
      std::vector<double> row(n, 0.0);
      double total = 0;
      for (double& a : row)
        if (random.below(3) > 0) total += a = random.uniform();
      rows.coefficients.push_back(row);
      rows.limits.push_back(total * (0.3 + 0.5 * random.uniform()));
      lp.add_row(row, rows.limits.back());
      ASSERT_TRUE(lp.solve());
      expect_optimal(lp, gain, rows);
    }
    for (double by : {0.3, -0.4, 0.25}) {
      bool possible = true;
      for (double& limit : rows.limits) possible &= (limit += by) >= 0;
      lp.shift_limits(by);
      ASSERT_EQ(lp.solve(), possible);
      if (!possible) break;
      expect_optimal(lp, gain, rows);
    }
  }
}

TEST(DeadlineLp, ImpossibleRowsAreReported) {
  DeadlineLp lp(std::vector<double>{1, 1});
  lp.add_row(std::vector<double>{1, 1}, -0.5);
  EXPECT_FALSE(lp.solve());
}

TEST(DeadlineLp, SaysWhenThePivotsRunOut) {
  const std::vector<double> gain = {3, 2, 1};
  const auto solved = [&](int64_t pivots) {
    DeadlineLp lp(gain);
    lp.add_row(std::vector<double>{1, 2, 3}, 1.5);
    lp.add_row(std::vector<double>{3, 2, 1}, 1.5);
    lp.add_row(std::vector<double>{2, 1, 2}, 1.2);
    return lp.solve(pivots);
  };
  EXPECT_FALSE(solved(1));
  EXPECT_TRUE(solved(0));
}

}  // namespace
}  // namespace sb
