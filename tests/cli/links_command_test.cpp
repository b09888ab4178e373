// Links between ranks that are processes: measured, used, and what is wrong with them named.
#include <nlohmann/json.hpp>

#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

class LinksCommand : public Cli {
 protected:
  std::string text_of(const std::string& path) const {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string train_file(const std::string& links) const {
    return write("train.yaml", R"(
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data: {synthetic: {task: chunk_recall, vocab_size: 16, length: 48, chunk: 4}}
batch: {global_batch_size: 4, micro_batch_sequences: 2}
attention: {pattern: dense}
parallel: {dp: 2}
train: {max_steps: 2, threads: 1, output_dir: )" +
                                   (directory_ / "run").string() +
                                   "}\nbalance: {batching: sab, profile: h200-analytic, links: " + links + "}\n");
  }
};

TEST_F(LinksCommand, MeasuredBetweenRanksTheyAreUsed) {
  const std::string links = (directory_ / "links.json").string();
  const ProgramResult measured = run_program({"profile", "--links", links, "--ranks", "2"});
  ASSERT_EQ(measured.exit_code, 0) << measured.err;
  EXPECT_NE(measured.out.find("wrote " + links), std::string::npos) << measured.out;
  nlohmann::json json = nlohmann::json::parse(text_of(links));
  ASSERT_EQ(json["hosts"].size(), 2u);
  EXPECT_EQ(json["hosts"][0], json["hosts"][1]);
  for (const char* link : {"transfer_inside", "reduce_inside", "gather_inside"}) {
    EXPECT_GT(json["host"][link]["gigabytes_per_second"], 0.001) << link;
    EXPECT_LT(json["host"][link]["gigabytes_per_second"], 1000) << link;
  }
  EXPECT_FALSE(json["host"].contains("reduce_between"));
  EXPECT_FALSE(json.contains("gpu"));

  // A profile of a GPU has none of these; one of a processor does.
  const ProgramResult refused = run_program({"simulate", "--links", links, "--dp", "2", "--steps", "1"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("has no links of GPUs"), std::string::npos) << refused.err;

  const ProgramResult trained = run_program({"train", train_file(links), "--ranks", "2"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_NE(trained.out.find("links: measured over MPI by 2 ranks on 1 host ("), std::string::npos) << trained.out;
  EXPECT_EQ(trained.err.find("was measured by"), std::string::npos) << trained.err;
  EXPECT_NE(text_of((directory_ / "run" / "machine.txt").string()).find("links: measured over MPI"), std::string::npos);

  // On other hosts they are used with a warning.
  json["hosts"] = {"elsewhere", "elsewhere"};
  const std::string other = write("other.json", json.dump());
  std::filesystem::remove_all(directory_ / "run");
  const ProgramResult warned = run_program({"train", train_file(other), "--ranks", "2"});
  ASSERT_EQ(warned.exit_code, 0) << warned.err;
  EXPECT_NE((warned.err + warned.out).find("was measured by 2 ranks on 1 host (elsewhere), but 2 ranks on 1 host ("),
            std::string::npos)
      << warned.err;
}

// The file that was there stays.
TEST_F(LinksCommand, ARankThatLeavesEndsTheMeasurement) {
  const std::string links = write("links.json", "as it was"), script = write("rank.sh", R"(#!/bin/sh
if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then exec timeout -s KILL 0.2 "$@"; fi
exec "$@"
)");
  const std::string command = "mpirun --quiet --allow-run-as-root --oversubscribe --bind-to none -n 2 sh " + script +
                              " " + SB_PROGRAM + " profile --links " + links + " > " + (directory_ / "out").string() +
                              " 2>&1";
  EXPECT_NE(std::system(command.c_str()), 0) << text_of((directory_ / "out").string());
  EXPECT_EQ(text_of(links), "as it was");
}

TEST_F(LinksCommand, WhatHasNoEffectIsRefused) {
  const std::string links = (directory_ / "links.json").string();
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--links", links}, "--links measures between the ranks that will train"},
      {{"--ranks", "2"}, "--ranks: only applies to --links"},
      {{"--links", links, "--ranks", "2", "--budget", "512"}, "--budget: has no effect with --links"},
  };
  for (const auto& [arguments, message] : cases) {
    std::vector<std::string> all = {"profile"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProgramResult refused = run_program(all);
    EXPECT_EQ(refused.exit_code, 2) << message;
    EXPECT_NE(refused.err.find(message), std::string::npos) << refused.err;
  }
  EXPECT_FALSE(std::filesystem::exists(links));
}

}  // namespace
}  // namespace sb::test
