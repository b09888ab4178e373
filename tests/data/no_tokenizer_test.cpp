#include <gtest/gtest.h>

#include "core/errors.h"
#include "data/tokenizer/tokenizer.h"

namespace sb {
namespace {

TEST(Tokenizer, SaysWhatTheBuildLacks) {
  try {
    Tokenizer::load("tokenizer.json");
    ADD_FAILURE() << "accepted";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("PCRE2"), std::string::npos);
  }
}

}  // namespace
}  // namespace sb
