#include "core/tensor.h"

#include <gtest/gtest.h>

#include <vector>

namespace sb {
namespace {

TEST(Tensor, RowsAndReshape) {
  std::vector<float> data(24);
  for (int i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  const TensorView t(data.data(), {4, 3, 2});
  EXPECT_EQ(t.elements(), 24);
  EXPECT_EQ(t.bytes(), 96);
  const TensorView middle = t.rows(1, 3);
  EXPECT_EQ(middle.shape(), Shape({2, 3, 2}));
  EXPECT_EQ(middle.f32()[0], 6.0f);
  EXPECT_EQ(t.reshaped({8, 3}).dim(0), 8);
  EXPECT_EQ(t.rows(4, 4).elements(), 0);
  EXPECT_THROW(t.rows(3, 5), InternalError);
  EXPECT_THROW(t.reshaped({5, 5}), InternalError);
}

TEST(Tensor, TypeIsChecked) {
  std::vector<int32_t> data(3);
  const TensorView t(data.data(), {3});
  EXPECT_EQ(t.dtype(), DType::i32);
  EXPECT_THROW(t.f32(), InternalError);
}

TEST(Shape, PrintsAndRefuses) {
  EXPECT_EQ(Shape({3, 4}).to_string(), "[3, 4]");
  EXPECT_EQ(Shape{}.elements(), 1);
  EXPECT_THROW(Shape({1, 2, 3, 4, 5}), InternalError);
  EXPECT_THROW(Shape({-1}), InternalError);
}

}  // namespace
}  // namespace sb
