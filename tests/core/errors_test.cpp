#include "core/errors.h"

#include <gtest/gtest.h>

namespace sb {
namespace {

TEST(Errors, CheckNamesPlaceConditionAndValues) {
  const int x = 3, y = 4;
  try {
    SB_CHECK(x == y, "x {} y {}", x, y);
    FAIL();
  } catch (const InternalError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("errors_test.cpp"), std::string::npos);
    EXPECT_NE(text.find("x == y"), std::string::npos);
    EXPECT_NE(text.find("x 3 y 4"), std::string::npos);
  }
  EXPECT_NO_THROW(SB_CHECK(x == 3));
}

TEST(Errors, UserCheckSaysExactlyTheMessage) {
  try {
    SB_USER_CHECK(false, "run.yaml:{}: {}", 7, "no such key");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "run.yaml:7: no such key");
  }
}

TEST(Errors, AllDeriveFromError) {
  EXPECT_THROW(throw UserError("a"), Error);
  EXPECT_THROW(throw InternalError("a"), Error);
  EXPECT_THROW(throw OutOfMemory("a"), Error);
}

}  // namespace
}  // namespace sb
