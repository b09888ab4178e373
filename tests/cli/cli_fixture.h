#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/cli/program.h"

namespace sb::test {

// A folder of its own for every test.
class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(::testing::TempDir()) /
                 (std::string("cli_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ / name) << text;
    return (directory_ / name).string();
  }
  std::string run_file() const {
    return write("run.yaml", "model: {init: {vocab_size: 64}}\ndata: {synthetic: {vocab_size: 64, length: 128}}\n");
  }

  std::filesystem::path directory_;
};

}  // namespace sb::test
