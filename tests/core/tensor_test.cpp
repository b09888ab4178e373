#include "core/tensor.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "tests/core/message_of.h"

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

TEST(Tensor, RowsOfEveryRankAndType) {
  std::vector<char> memory(4 * 3 * 2 * 5 * 8);
  const Shape shapes[] = {{4}, {4, 3}, {4, 3, 2}, {4, 3, 2, 5}};
  for (const Shape& shape : shapes) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64}) {
      const TensorView t(memory.data(), dtype, shape, DeviceKind::cuda);
      const TensorView part = t.rows(1, 3);
      EXPECT_EQ(part.shape().rank(), shape.rank());
      EXPECT_EQ(part.dim(0), 2);
      for (int d = 1; d < shape.rank(); ++d) EXPECT_EQ(part.dim(d), shape[d]);
      EXPECT_EQ(static_cast<char*>(part.raw()) - memory.data(), t.bytes() / 4) << shape.to_string();
      EXPECT_EQ(part.bytes(), t.bytes() / 2);
      EXPECT_EQ(part.device(), DeviceKind::cuda);
      EXPECT_EQ(part.dtype(), dtype);
      EXPECT_EQ(part.rows(1, 2).raw(), t.rows(2, 3).raw()) << "rows of rows";
      EXPECT_EQ(t.reshaped({t.elements()}).device(), DeviceKind::cuda);
    }
  }
}

TEST(Tensor, RowsOutOfRangeAreRefused) {
  float data[6] = {};
  const TensorView t(data, {3, 2});
  const std::pair<int64_t, int64_t> cases[] = {{-1, 2}, {2, 1}, {0, 4}, {4, 4}};
  for (const auto& [begin, end] : cases) EXPECT_THROW(t.rows(begin, end), InternalError) << begin << " " << end;
  EXPECT_THROW(TensorView(data, Shape{}).rows(0, 1), InternalError) << "a number has no rows";
}

TEST(Tensor, EmptyOnes) {
  EXPECT_TRUE(TensorView().empty());
  float data[1] = {};
  const TensorView none(data, {0, 7});
  EXPECT_FALSE(none.empty()) << "there is memory, though no elements";
  EXPECT_EQ(none.bytes(), 0);
  EXPECT_EQ(none.rows(0, 0).shape(), Shape({0, 7}));
  EXPECT_EQ(none.reshaped({3, 0}).elements(), 0);
  EXPECT_THROW(none.reshaped({1}), InternalError);
}

TEST(Tensor, TypesHaveTheirSizesAndNames) {
  const std::tuple<DType, int64_t, const char*> cases[] = {
      {DType::f32, 4, "f32"}, {DType::bf16, 2, "bf16"}, {DType::f16, 2, "f16"},
      {DType::i32, 4, "i32"}, {DType::i64, 8, "i64"},
  };
  char memory[8] = {};
  for (const auto& [dtype, bytes, name] : cases) {
    EXPECT_EQ(dtype_bytes(dtype), bytes) << name;
    EXPECT_EQ(dtype_name(dtype), name);
    const TensorView t(memory, dtype, {1});
    const int fitting = (message_of<InternalError>([&] { t.as<float>(); }) == kNothingThrown) +
                        (message_of<InternalError>([&] { t.as<const int32_t>(); }) == kNothingThrown) +
                        (message_of<InternalError>([&] { t.as<int64_t>(); }) == kNothingThrown);
    EXPECT_EQ(fitting, bytes == 2 ? 0 : 1) << name;
    if (dtype != DType::f32) {
      EXPECT_NE(message_of<InternalError>([&] { t.f32(); }).find(std::string("holds ") + name), std::string::npos);
    }
  }
}

TEST(Shape, ComparesByWhatItHolds) {
  EXPECT_EQ(Shape({2, 3}), Shape({2, 3}));
  EXPECT_NE(Shape({2, 3}), Shape({3, 2}));
  EXPECT_NE(Shape({2}), Shape({2, 1})) << "as many elements, another rank";
  EXPECT_NE(Shape({0}), Shape{});
  EXPECT_EQ(Shape{}.to_string(), "[]");
  EXPECT_EQ(Shape({1 << 20, 1 << 20}).elements(), int64_t{1} << 40);
}

}  // namespace
}  // namespace sb
