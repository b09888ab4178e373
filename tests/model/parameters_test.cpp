#include "model/parameters.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace sb {
namespace {

TEST(ParameterSetTest, LaysParametersOutAlignedWithZeroPadding) {
  ParameterSet set;
  const int a = set.declare("a", {3, 5}, {{"hf.a", 0, 3}});
  const int b = set.declare("b", {7}, {{"hf.b0", 0, 2}, {"hf.b1", 2, 7}});
  const int c = set.declare("c", {16}, {{"hf.c", 0, 16}});
  set.allocate(true);
  EXPECT_EQ(set.count(), 3);
  EXPECT_EQ(set.parameter(a).offset, 0);
  EXPECT_EQ(set.parameter(b).offset, 16);
  EXPECT_EQ(set.parameter(c).offset, 32);
  EXPECT_EQ(set.flat_elements(), 48);
  EXPECT_EQ(set.flat_bytes(), 48 * 4);
  EXPECT_EQ(set.elements(), 15 + 7 + 16);
  EXPECT_TRUE(set.parameter(a).decay);
  EXPECT_FALSE(set.parameter(b).decay);
  EXPECT_EQ(set.value(a).shape(), (Shape{3, 5}));
  EXPECT_EQ(set.value(b).f32(), set.values().f32() + 16);
  EXPECT_EQ(set.gradient(c).f32(), set.gradients().f32() + 32);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(set.value(b).raw()) % 64, 0u);
  for (int64_t i = 0; i < 48; ++i) {
    EXPECT_EQ(set.values().f32()[i], 0);
    EXPECT_EQ(set.gradients().f32()[i], 0);
  }
  set.gradient(b).f32()[6] = 2;
  set.zero_gradients();
  EXPECT_EQ(set.gradient(b).f32()[6], 0);
}

TEST(ParameterSetTest, AProductWritesAGradientOnceAndAddsThen) {
  ParameterSet set;
  const int norm = set.declare("norm", {5}, {{"hf.norm", 0, 5}}), a = set.declare("a", {3, 5}, {{"hf.a", 0, 3}});
  set.end_group(1);
  const int b = set.declare("b", {2, 2}, {{"hf.b", 0, 2}}), bias = set.declare("bias", {7}, {{"hf.bias", 0, 7}});
  set.end_group(1);
  set.allocate(true);
  EXPECT_TRUE(set.add_to_gradient(a));  // zeros
  std::fill_n(set.gradients().f32(), set.flat_elements(), 8.0f);
  set.begin_gradients();
  EXPECT_TRUE(set.add_to_gradient(norm));
  EXPECT_TRUE(set.add_to_gradient(bias));
  EXPECT_FALSE(set.add_to_gradient(a));
  EXPECT_TRUE(set.add_to_gradient(a));
  set.complete_gradients({}, 1);
  EXPECT_TRUE(set.add_to_gradient(b));
  // All that is left is what the product would have written.
  for (int64_t i = 0; i < set.flat_elements(); ++i) {
    const int64_t inside = i - set.parameter(a).offset;
    EXPECT_EQ(set.gradients().f32()[i], 0 <= inside && inside < 15 ? 8.0f : 0.0f) << i;
  }
  set.begin_gradients();
  set.zero_gradients();
  EXPECT_TRUE(set.add_to_gradient(a));
}

TEST(ParameterSetTest, WithoutGradients) {
  ParameterSet set;
  set.declare("a", {2}, {{"hf.a", 0, 2}});
  set.allocate(false);
  EXPECT_THROW(set.gradients(), InternalError);
  EXPECT_THROW(set.gradient(0), InternalError);
  EXPECT_THROW(set.zero_gradients(), InternalError);
  EXPECT_THROW(set.begin_gradients(), InternalError);
}

TEST(ParameterSetTest, RefusesPartsThatDoNotCoverTheRows) {
  ParameterSet set;
  EXPECT_THROW(set.declare("short", {4}, {{"x", 0, 3}}), InternalError);
  EXPECT_THROW(set.declare("gap", {4}, {{"x", 0, 1}, {"y", 2, 4}}), InternalError);
  EXPECT_THROW(set.declare("long", {4}, {{"x", 0, 5}}), InternalError);
  EXPECT_THROW(set.declare("none", {4}, {}), InternalError);
  EXPECT_THROW(set.declare("empty", {0}, {}), InternalError);
}

TEST(ParameterSetTest, IsDeclaredBeforeItIsAllocatedOnce) {
  ParameterSet set;
  set.declare("a", {2}, {{"hf.a", 0, 2}});
  EXPECT_THROW(set.value(0), InternalError);
  EXPECT_THROW(set.values(), InternalError);
  set.allocate(false);
  EXPECT_THROW(set.allocate(false), InternalError);
  EXPECT_THROW(set.declare("b", {2}, {{"hf.b", 0, 2}}), InternalError);
}

}  // namespace
}  // namespace sb
