#include "core/errors.h"

#include <gtest/gtest.h>

#include "tests/core/message_of.h"

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

TEST(Errors, ConditionsAreEvaluatedOnceAndTheirTextIsNoFormat) {
  int calls = 0;
  SB_CHECK(++calls == 1);
  SB_USER_CHECK(++calls == 2, "never said {}", calls);
  EXPECT_EQ(calls, 2);
  const std::string text = message_of<InternalError>([] { SB_CHECK(std::string{}.size() == 1); });
  EXPECT_NE(text.find("`std::string{}.size() == 1`"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("`")) << "no colon where there is no message: " << text;
}

// Arguments are text, whatever they hold.
TEST(Errors, BracesInArgumentsStay) {
  EXPECT_EQ(message_of([] { throw UserError("{}: {}", "{0}", "100 % {unfinished"); }), "{0}: 100 % {unfinished");
  EXPECT_EQ(message_of<InternalError>([] {
              throw_internal_error({"x.cpp", 3, "a"}, "{}", fmt::make_format_args("{}"));
            }),
            "x.cpp:3: broken invariant `a`: {}");
}

TEST(Errors, PathsBeginAtTheSourceFolder) {
  const std::pair<const char*, const char*> cases[] = {{"/home/somebody/src/core/arena.cpp", "src/core/arena.cpp"},
                                                       {"/src/tree/src/a.cpp", "src/a.cpp"},
                                                       {"src/a.cpp", "src/a.cpp"},
                                                       {"/elsewhere/a.cpp", "/elsewhere/a.cpp"},
                                                       {"", ""}};
  for (const auto& test : cases)
    EXPECT_EQ(message_of<InternalError>([&] {
                throw_internal_error({test.first, 12, "c"}, "", {});
              }),
              std::string(test.second) + ":12: broken invariant `c`");
}

// Who catches one kind must not catch another: the exit code depends on it.
TEST(Errors, KindsAreApart) {
  EXPECT_EQ(message_of<UserError>([] {
              EXPECT_EQ(message_of<InternalError>([] {
                          EXPECT_EQ(message_of<OutOfMemory>([] { throw InternalError("i"); }), kNothingThrown);
                        }),
                        "i");
              throw UserError("u");
            }),
            "u");
}

}  // namespace
}  // namespace sb
