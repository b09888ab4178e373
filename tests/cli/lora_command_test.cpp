// Adapters from the command line: train, eval --adapter, merge.
#include <nlohmann/json.hpp>

#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

class LoraCommands : public Cli {
 protected:
  std::string path(const std::string& name) const { return (directory_ / name).string(); }

  double loss(const std::vector<std::string>& model) const {
    std::vector<std::string> arguments = {"eval", "ppl", "--data", path("copy"), "--json", path("ppl.json")};
    arguments.insert(arguments.end(), model.begin(), model.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::ifstream file(path("ppl.json"));
    return nlohmann::json::parse(file)["rows"].back()["loss"];
  }
};

TEST_F(LoraCommands, AnAdapterIsTrainedEvaluatedAndMerged) {
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--length", "64", "--sequences", "4", "--vocab-size", "64",
                         "--output", path("copy")})
                .exit_code,
            0);
  const std::string base = "tests/data/hf/qwen2_tied";
  const std::string run = write("lora.yaml", "model: {path: " + base + "}\ndata: {train: [" + path("copy") +
                                                 "], max_sequence_length: 64}\nbatch: {global_batch_size: 2}\n"
                                                 "lora: {rank: 2, alpha: 16}\n"
                                                 "optimizer: {learning_rate: 1.0e-2, schedule: constant}\n"
                                                 "train: {max_steps: 4, output_dir: " +
                                                 path("run") + "}\n");
  const ProgramResult trained = run_program({"train", run});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_NE(trained.out.find("frozen weights"), std::string::npos) << trained.out;
  const std::string adapter = path("run/final");
  const double plain = loss({"--model", base}), adapted = loss({"--model", base, "--adapter", adapter});
  EXPECT_GT(std::abs(plain - adapted), 1e-4);

  const ProgramResult merged = run_program({"merge", base, adapter, path("merged")});
  ASSERT_EQ(merged.exit_code, 0) << merged.err;
  EXPECT_NEAR(loss({"--model", path("merged")}), adapted, 1e-6);
  // In half the bytes, and the loss of rounded weights.
  const ProgramResult rounded = run_program({"merge", base, adapter, path("rounded"), "--dtype", "bfloat16"});
  ASSERT_EQ(rounded.exit_code, 0) << rounded.err;
  const auto size = [&](const char* folder) {
    return static_cast<double>(std::filesystem::file_size(directory_ / folder / "model.safetensors"));
  };
  EXPECT_NEAR(size("rounded") / size("merged"), 0.5, 0.01);
  EXPECT_NEAR(loss({"--model", path("rounded")}), adapted, 0.02);
  // Nothing is written over.
  const ProgramResult again = run_program({"merge", base, adapter, path("merged")});
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_NE(again.err.find("already exists; name a new directory"), std::string::npos) << again.err;
  // And nothing is left of what fails.
  std::filesystem::remove(directory_ / "run/final/adapter_model.safetensors");
  const ProgramResult failed = run_program({"merge", base, adapter, path("other")});
  EXPECT_EQ(failed.exit_code, 2);
  EXPECT_NE(failed.err.find("adapter_model.safetensors"), std::string::npos) << failed.err;
  EXPECT_FALSE(std::filesystem::exists(directory_ / "other"));
}

TEST_F(LoraCommands, SimulateKnowsTheBackwardOfAFrozenModel) {
  const std::vector<std::string> few = {"simulate", "--steps", "3", "--policies", "in_order,sab", "--no-frontier"};
  std::vector<std::string> adapters = few;
  adapters.insert(adapters.end(), {"--lora", "32"});
  const ProgramResult result = run_program(adapters);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("adapters of rank 32 on a frozen model: derived from a profile of full fine-tuning"),
            std::string::npos)
      << result.out;
  EXPECT_EQ(run_program(few).out.find("adapters of rank"), std::string::npos);
}

}  // namespace
}  // namespace sb::test
