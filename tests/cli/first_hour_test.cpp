// What a newcomer meets first: init, doctor, completion, and data or models that are not what they should be.
#include <sys/wait.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "run/config/run_config.h"
#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

constexpr const char* kModel = "tests/data/hf/qwen2_tied";

class FirstHour : public Cli {
 protected:
  // Token files of the model's vocabulary.
  std::string data(const std::string& name = "data", const std::string& length = "256") {
    const std::string prefix = (directory_ / name).string();
    const ProgramResult made = run_program({"data", "synth", "--task", "copy", "--length", length, "--sequences", "8",
                                            "--vocab-size", "64", "--output", prefix});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return prefix;
  }
};

TEST_F(FirstHour, InitWritesARunThatTrains) {
  const std::string out = (directory_ / "my.yaml").string(), tokens = data();
  const std::vector<std::string> init = {"init", "--model", kModel, "--data", tokens, "--out", out, "--device", "cpu"};
  const ProgramResult written = run_program(init);
  ASSERT_EQ(written.exit_code, 0) << written.err;
  EXPECT_NE(written.out.find("next: sparsebalance train " + out), std::string::npos) << written.out;
  const RunConfig config = load_run_config(out);
  EXPECT_EQ(config.device, DeviceKind::cpu);
  EXPECT_EQ(config.model.path, kModel);
  EXPECT_EQ(config.data.max_sequence_length, 1024) << "the longest document, rounded up";
  EXPECT_EQ(config.attention.selection.pattern, SelectionPattern::dense);
  EXPECT_EQ(config.parallel.dp, 1);
  const ProgramResult again = run_program(init);
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_NE(again.err.find("already exists"), std::string::npos) << again.err;
  const ProgramResult trained =
      run_program({"train", out, "--set", "train.max_steps=1", "--set", "train.num_train_epochs=0", "--set",
                   "train.output_dir=" + (directory_ / "run").string()});
  EXPECT_EQ(trained.exit_code, 0) << trained.err;
}

TEST_F(FirstHour, InitOfSeveralRanksAndLongSequencesBalancesAndStretches) {
  const std::string out = (directory_ / "my.yaml").string();
  const ProgramResult written = run_program({"init", "--model", kModel, "--data", data(), "--out", out, "--overwrite",
                                             "--device", "cuda", "--ranks", "4", "--length", "131072"});
  ASSERT_EQ(written.exit_code, 0) << written.err;
  const RunConfig config = load_run_config(out);
  EXPECT_EQ(config.device, DeviceKind::cuda);
  EXPECT_EQ(config.parallel.dp, 4);
  EXPECT_EQ(config.balance.batching, BatchingPolicy::sab);
  EXPECT_EQ(config.attention.selection.pattern, SelectionPattern::mass);
  ASSERT_TRUE(config.model.rope);
  EXPECT_GE(config.model.rope->factor * static_cast<double>(config.model.rope->original_max_position_embeddings),
            131072);
}

// Models whose config.json says less, or more, about positions than most.
TEST_F(FirstHour, InitKnowsHowFarAModelReaches) {
  const std::string out = (directory_ / "my.yaml").string(), tokens = data("data", "5000");
  const auto length = [&](const std::string& positions, std::vector<std::string> more = {}) {
    const std::string model = (directory_ / "model").string();
    std::filesystem::create_directories(model);
    write("model/config.json",
          R"({"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160,
              "num_hidden_layers": 1, "num_attention_heads": 4)" +
              positions + "}");
    std::vector<std::string> arguments = {"init",  "--model", model,      "--data", tokens,
                                          "--out", out,       "--device", "cpu",    "--overwrite"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult written = run_program(arguments);
    EXPECT_EQ(written.exit_code, 0) << written.err;
    return load_run_config(out).data.max_sequence_length;
  };
  const std::string yarn = R"(, "max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", "factor": 3.0})";
  EXPECT_EQ(length(""), 2048) << "Llama's default";
  EXPECT_EQ(length(yarn), 3072);
  EXPECT_EQ(length(yarn, {"--length", "8192"}), 8192);
  const RunConfig stretched = load_run_config(out);
  ASSERT_TRUE(stretched.model.rope);
  EXPECT_EQ(stretched.model.rope->factor, 8);
  EXPECT_EQ(stretched.model.rope->original_max_position_embeddings, 1024);
}

TEST_F(FirstHour, InitRefusesDataWithoutAnythingToLearn) {
  const std::string tokens = (directory_ / "none").string(), out = (directory_ / "my.yaml").string();
  // An index of one sequence without tokens.
  std::string index("MMIDIDX\0\0\1\0\0\0\0\0\0\0\4\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 34);
  write("none.idx", index + std::string(12, '\0'));
  write("none.bin", "");
  const ProgramResult refused = run_program({"init", "--model", kModel, "--data", tokens, "--out", out});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("nothing to train on"), std::string::npos) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST_F(FirstHour, DoctorNamesWhatIsThere) {
  const ProgramResult result = run_program({"doctor"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* part :
       {"processor   ", " kernels", "matmuls     OpenBLAS for ", " of the processor's peak of ", "memory      ",
        "disk        ", "GPU         ", "NCCL        ", "MPI         ", "tokenizer   "})
    EXPECT_NE(result.out.find(part), std::string::npos) << part << " in\n" << result.out;
}

// By the shell itself, as it asks for the words after a command.
TEST_F(FirstHour, CompletionOffersCommandsAndOptions) {
  const ProgramResult script = run_program({"completion"});
  ASSERT_EQ(script.exit_code, 0) << script.err;
  const std::string file = write("completion.bash", script.out);
  const auto completed = [&](const std::string& words, int at) {
    const std::string command = "bash -c 'source " + file + "; COMP_WORDS=(" + words +
                                "); COMP_CWORD=" + std::to_string(at) + "; _sparsebalance; echo ${COMPREPLY[@]}'";
    std::FILE* shell = popen(command.c_str(), "r");
    std::string out;
    char buffer[4096];
    while (const size_t read = std::fread(buffer, 1, sizeof buffer, shell)) out.append(buffer, read);
    EXPECT_EQ(pclose(shell), 0);
    return out;
  };
  EXPECT_EQ(completed("sparsebalance tr", 1), "train\n");
  EXPECT_EQ(completed("sparsebalance data sta", 2), "stats\n");
  EXPECT_EQ(completed("sparsebalance data tokenize --tok", 3), "--tokenizer\n");
  EXPECT_EQ(completed("sparsebalance eval needle --de", 3), "--device --depths\n");
}

TEST_F(FirstHour, TheManualPageHasEveryCommand) {
  const ProgramResult page = run_program({"man"});
  ASSERT_EQ(page.exit_code, 0) << page.err;
  EXPECT_EQ(page.out.rfind(".TH SPARSEBALANCE 1", 0), 0u);
  for (const char* part :
       {".SH \"sparsebalance train\"", ".SH \"sparsebalance data tokenize\"", ".B \\-\\-append\\-eod"})
    EXPECT_NE(page.out.find(part), std::string::npos) << part;
}

TEST_F(FirstHour, WhatIsNoWholeModelIsCalledByItsName) {
  const auto training_error = [&](const std::string& model) {
    return run_program({"train",
                        write("run.yaml", "model: {path: " + model + "}\ndata: {train: [" + data() +
                                              "], max_sequence_length: 256}\n"),
                        "--set", "train.output_dir=" + (directory_ / "run").string()})
        .err;
  };
  std::filesystem::create_directories(directory_ / "lora");
  write("lora/adapter_config.json", "{}");
  EXPECT_NE(training_error((directory_ / "lora").string()).find("a LoRA adapter"), std::string::npos);
  std::filesystem::remove((directory_ / "data.idx"));
  std::filesystem::copy(kModel, directory_ / "lfs");
  std::filesystem::permissions(directory_ / "lfs/model.safetensors", std::filesystem::perms::owner_all);
  write("lfs/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n");
  EXPECT_NE(training_error((directory_ / "lfs").string()).find("a Git LFS pointer"), std::string::npos);
}

TEST_F(FirstHour, AFolderIsNoPrefixOfTokenFiles) {
  const std::string folder = directory_.string() + "/";
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"data", "synth", "--output", folder},
           {"data", "tokenize", "--tokenizer", "t", "--input", "i", "--output", folder}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(folder + ": is a directory; add the first part of the file names"), std::string::npos)
        << result.err;
  }
}

TEST_F(FirstHour, WhatIsNoTextOrTokenizerIsCalledByItsName) {
  const std::string chats = write("chats.jsonl", "plain text\n"), out = (directory_ / "t").string();
  const auto said = [&](const std::string& tokenizer, const std::string& input) {
    const ProgramResult result =
        run_program({"data", "tokenize", "--tokenizer", tokenizer, "--input", input, "--output", out});
    EXPECT_EQ(result.exit_code, 2);
    return result.err;
  };
  const std::string tokenizer = "tests/data/tokenizer_qwen2_style/tokenizer.json", folder = directory_.string();
  const std::pair<std::string, std::string> cases[] = {
      {said(tokenizer, folder), folder + ": is a directory; name the files in it, for example " + folder + "/*.jsonl"},
      {said(tokenizer, chats),
       "chats.jsonl:1: invalid JSON at byte 1 of the line, near \"plain text\"; every line must"},
      {said(kModel + std::string("/config.json"), chats), "config.json: not a tokenizer.json: \"model\" is missing"}};
  for (const auto& [message, expected] : cases) EXPECT_NE(message.find(expected), std::string::npos) << message;
}

TEST_F(FirstHour, LayoutsAndBudgetsThatCannotBeKeptAreSaidOnce) {
  const std::string out = (directory_ / "my.yaml").string();
  const std::string tokens = data("data", "1024");
  ASSERT_EQ(run_program({"init", "--model", kModel, "--data", tokens, "--out", out, "--device", "cpu"}).exit_code, 0);
  const ProgramResult empty = run_program({"train", out, "--set", "parallel.pp=99", "--ranks", "99"});
  EXPECT_EQ(empty.exit_code, 2);
  EXPECT_TRUE(empty.err.starts_with("error: parallel.pp: 99 stages are more than the model's ")) << empty.err;
  const auto warned = [&](const std::string& budget) {
    return run_program({"train", out, "--set", "train.max_steps=1", "--set", "train.num_train_epochs=0", "--set",
                        "attention={pattern: mass, block: 64, budget: " + budget + "}", "--set",
                        "train.output_dir=" + (directory_ / budget).string()})
        .err;
  };
  const std::string small = warned("100");
  EXPECT_NE(small.find("attention.budget: 100 is below 1 sink + 2 local + 2 blocks of 64 tokens = 320"),
            std::string::npos)
      << small;
  EXPECT_EQ(warned("320").find("attention.budget"), std::string::npos);
}

TEST_F(FirstHour, TokensOfAnotherTokenizerAreWarnedOf) {
  const std::string text = write("text.jsonl", "{\"text\": \"some words to learn from\"}\n"),
                    tokens = (directory_ / "t").string();
  const std::string tokenizer = "tests/data/tokenizer_reference/llama3_style.json";
  const ProgramResult made =
      run_program({"data", "tokenize", "--tokenizer", tokenizer, "--input", text, "--output", tokens});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  std::filesystem::copy(kModel, directory_ / "model");
  const auto check = [&](const std::string& file) {
    std::filesystem::copy_file(file, directory_ / "model/tokenizer.json",
                               std::filesystem::copy_options::overwrite_existing);
    return run_program({"data", "check", tokens, "--model", (directory_ / "model").string()}).err;
  };
  EXPECT_EQ(check(tokenizer).find("model's tokenizer"), std::string::npos);
  const std::string warned = check("tests/data/tokenizer_qwen2_style/tokenizer.json");
  EXPECT_NE(warned.find("was not made with the model's tokenizer"), std::string::npos) << warned;
  EXPECT_NE(warned.find(tokenizer), std::string::npos) << warned;
  const auto shown = [&](const std::string& file) {
    return run_program({"data", "show", tokens, "--tokenizer", file}).err;
  };
  EXPECT_EQ(shown(tokenizer), "");
  EXPECT_NE(shown("tests/data/tokenizer_qwen2_style").find("another tokenizer than --tokenizer"), std::string::npos);
}

TEST_F(FirstHour, PerplexitySaysWhenItCuts) {
  const std::string tokens = data("long", "2048");
  const auto warned = [&](const char* most) {
    const ProgramResult result =
        run_program({"eval", "ppl", "--model", kModel, "--data", tokens, "--max-tokens", most, "--sequences", "1"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.err;
  };
  EXPECT_NE(warned("512").find("8 of 8 documents are longer than --max-tokens 512 and are split"), std::string::npos);
  EXPECT_EQ(warned("2048").find("longer than"), std::string::npos);
}

TEST_F(FirstHour, LongBenchHasAMeanForEachTask) {
  const auto line = [](const char* task, const char* answer) {
    return std::string(R"({"input": "", "context": "a", "answers": [")") + answer +
           R"("], "all_classes": null, "dataset": ")" + task + "\"}\n";
  };
  const std::string input = write("in.jsonl", line("qasper", "b") + line("qasper", "b") + line("hotpotqa", "b"));
  const std::string predictions = write("out.jsonl", "{\"pred\": \"b\"}\n{\"pred\": \"x\"}\n{\"pred\": \"b\"}\n");
  const std::string json = (directory_ / "scores.json").string();
  const ProgramResult result =
      run_program({"eval", "longbench", "--input", input, "--predictions", predictions, "--json", json});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find(
                "hotpotqa               100.00 over 1 samples\nqasper                 50.00 ± 50.00 over 2 samples\n"),
            std::string::npos)
      << result.out;
  EXPECT_NE(result.out.find(": 75.00 over 3 samples, the mean of 2 tasks\n"), std::string::npos) << result.out;
  std::ifstream file(json);
  EXPECT_EQ(nlohmann::json::parse(file)["tasks"]["qasper"]["score"], 50.0);
}

}  // namespace
}  // namespace sb::test
