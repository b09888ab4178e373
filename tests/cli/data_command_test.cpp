#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cli/progress.h"
#include "tests/cli/program.h"

namespace sb::test {
namespace {

class DataCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(::testing::TempDir()) /
                 (std::string("cli_data_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(directory_ / name) << text; }

  std::filesystem::path directory_;
};

TEST_F(DataCommand, SynthesisedTokensAndTheirStatistics) {
  const ProgramResult synth = run_program({"data", "synth", "--task", "needle_multi_key", "--sequences", "5",
                                           "--length", "512", "--vocab-size", "100", "--output", path("syn")});
  ASSERT_EQ(synth.exit_code, 0) << synth.err;
  for (const char* file : {"syn.bin", "syn.idx", "syn.mask"}) EXPECT_TRUE(std::filesystem::exists(path(file))) << file;
  EXPECT_EQ(std::filesystem::file_size(path("syn.bin")), 5u * 512 * 2);
  const ProgramResult stats = run_program({"data", "stats", path("syn")});
  EXPECT_EQ(stats.exit_code, 0) << stats.err;
  EXPECT_NE(stats.out.find("5 sequences, 2,560 tokens"), std::string::npos) << stats.out;
  const ProgramResult json = run_program({"data", "stats", "--json", path("syn")});
  EXPECT_NE(json.out.find("\"tokens\": 2560"), std::string::npos) << json.out;
  EXPECT_EQ(run_program({"data", "synth", "--output", path("syn")}).exit_code, 2) << "the output exists";
}

TEST_F(DataCommand, SynthesisedText) {
  const ProgramResult synth = run_program({"data", "synth", "--text", "--task", "vt", "--sequences", "3", "--length",
                                           "1000", "--output", path("vt.jsonl")});
  ASSERT_EQ(synth.exit_code, 0) << synth.err;
  std::ifstream file(path("vt.jsonl"));
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines)
    EXPECT_EQ(line.rfind("{\"index\":" + std::to_string(lines) + ",\"input\":\"Memorize", 0), 0u) << line;
  EXPECT_EQ(lines, 3);
  const ProgramResult again = run_program({"data", "synth", "--text", "--task", "vt", "--output", path("vt.jsonl")});
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_NE(again.err.find("already exists"), std::string::npos) << again.err;
  const ProgramResult words = run_program({"data", "synth", "--tokenizer", path("t.json"), "--output", path("y")});
  EXPECT_EQ(words.exit_code, 2);
  EXPECT_NE(words.err.find("--tokenizer requires --text"), std::string::npos) << words.err;
}

TEST_F(DataCommand, TokenizeNamesTheBadLine) {
  write("a.jsonl", "{\"text\": \"Hello, world!\"}\nnot json\n");
  const std::vector<std::string> command = {"data",
                                            "tokenize",
                                            "--tokenizer",
                                            "tests/data/tokenizer_qwen2_style/tokenizer.json",
                                            "--input",
                                            path("a.jsonl"),
                                            "--output",
                                            path("out"),
                                            "--append-eod",
                                            "--workers",
                                            "2"};
  const ProgramResult failed = run_program(command);
  if (failed.err.find("this build has no tokenizer") != std::string::npos) GTEST_SKIP() << failed.err;
  EXPECT_EQ(failed.exit_code, 2);
  EXPECT_NE(failed.err.find("a.jsonl:2:"), std::string::npos) << failed.err;
  EXPECT_FALSE(std::filesystem::exists(path("out.idx")));
  std::vector<std::string> skipping = command;
  skipping.push_back("--skip-bad-lines");
  const ProgramResult done = run_program(skipping);
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.out.find("1 documents, 6 tokens, 1 bad lines"), std::string::npos) << done.out;
  EXPECT_EQ(std::filesystem::file_size(path("out.bin")), 6u * 2);
}

TEST_F(DataCommand, Lengths) {
  for (const char* pool : {"chatqa2-like", "longalign-like"}) {
    const ProgramResult named =
        run_program({"data", "lengths", "--pool", pool, "--count", "50", "--output", path("pool.txt")});
    ASSERT_EQ(named.exit_code, 0) << named.err;
    std::ifstream file(path("pool.txt"));
    std::string line;
    std::getline(file, line);
    EXPECT_EQ(line, std::string("# ") + pool + ", 50 drawn with seed 1");
    int lengths = 0;
    while (std::getline(file, line)) lengths += std::stoll(line) > 0;
    EXPECT_EQ(lengths, 50);
  }
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--sequences", "4", "--lengths", path("pool.txt"),
                         "--output", path("syn")})
                .exit_code,
            0);
  const ProgramResult from_files =
      run_program({"data", "lengths", "--input", path("syn"), "--output", path("own.txt")});
  ASSERT_EQ(from_files.exit_code, 0) << from_files.err;
  EXPECT_NE(from_files.out.find("4 sequences"), std::string::npos);
  EXPECT_EQ(run_program({"data", "stats", "--lengths", path("own.txt")}).exit_code, 0);
  EXPECT_EQ(run_program({"data", "lengths", path("syn"), "--output", path("same.txt")}).exit_code, 0);
  EXPECT_EQ(run_program({"data", "lengths", "--output", path("x")}).exit_code, 2);
  EXPECT_EQ(run_program({"data", "lengths", "--pool", "none", "--output", path("x")}).exit_code, 2);
}

TEST_F(DataCommand, CheckReadsEveryToken) {
  for (const char* name : {"a", "b"})
    ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--sequences", "6", "--length", "64", "--vocab-size",
                           "50", "--output", path(name)})
                  .exit_code,
              0);
  const ProgramResult sound = run_program({"data", "check", "--vocab-size", "50", path("*")});
  EXPECT_EQ(sound.exit_code, 0) << sound.err;
  // The first token of each copy is not predicted.
  EXPECT_NE(sound.out.find("a: 6 documents, 384 tokens, 186 targets"), std::string::npos) << sound.out;
  // Token 7 of document 2 becomes 60: fine for a larger vocabulary.
  std::fstream(path("a.bin"), std::ios::in | std::ios::out | std::ios::binary).seekp(2 * (2 * 64 + 7)).put(60);
  write("config.json", R"({"model_type": "qwen2", "vocab_size": 61, "hidden_size": 8, "intermediate_size": 8,
      "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1})");
  EXPECT_EQ(run_program({"data", "check", "--model", directory_.string(), path("a"), path("b")}).exit_code, 0);
  // A file that cannot even be opened does not hide what is wrong with the others.
  write("c.idx", "");
  write("c.bin", "");
  const ProgramResult bad = run_program({"data", "check", "--vocab-size", "50", path("*")});
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_NE(bad.out.find("1 tokens in 1 documents are outside the vocabulary of 50, first token 7 of document 2: 60"),
            std::string::npos)
      << bad.out;
  EXPECT_NE(bad.out.find("c.idx: truncated"), std::string::npos) << bad.out;
  EXPECT_NE(bad.err.find("2 of 3 token files"), std::string::npos) << bad.err;
}

TEST_F(DataCommand, SplitAndMergeLoseNoDocument) {
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--sequences", "20", "--length", "64", "--vocab-size", "50",
                         "--output", path("all")})
                .exit_code,
            0);
  const std::vector<std::string> split = {"data",   "split", path("all"), "--validation", "0.25",
                                          "--seed", "3",     "--output",  path("part")};
  const ProgramResult parts = run_program(split);
  ASSERT_EQ(parts.exit_code, 0) << parts.err;
  EXPECT_EQ(parts.out, path("part-train") + ": 15 documents, 960 tokens\n" + path("part-validation") +
                           ": 5 documents, 320 tokens\n");
  EXPECT_EQ(run_program(split).exit_code, 2) << "nothing is replaced unasked";
  const ProgramResult whole =
      run_program({"data", "merge", path("part-train"), path("part-validation"), "--output", path("again")});
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_EQ(whole.out, path("again") + ": 20 documents, 1280 tokens\n");
  const ProgramResult all = run_program({"data", "split", path("all"), "--validation", "1", "--output", path("none")});
  EXPECT_EQ(all.exit_code, 2);
  EXPECT_NE(all.err.find("--validation 1: must be above 0 and below 1"), std::string::npos) << all.err;
}

// Three tokens of a chat's frame, the user's message and the assistant's, of which the answer and its end count.
TEST_F(DataCommand, ShowTellsWhatIsLearned) {
  const std::string tokenizer = "tests/data/tokenizer_qwen2_style/tokenizer.json";
  write("a.jsonl",
        "{\"text\": \"Hello, world!\"}\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \"What is it?\"}, "
        "{\"role\": \"assistant\", \"content\": \"A day.\"}]}\n");
  const ProgramResult made =
      run_program({"data", "tokenize", "--tokenizer", tokenizer, "--input", path("a.jsonl"), "--output", path("out")});
  if (made.err.find("this build has no tokenizer") != std::string::npos) GTEST_SKIP() << made.err;
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const ProgramResult chat = run_program({"data", "show", path("out"), "--tokenizer",
                                          "tests/data/tokenizer_qwen2_style", "--document", "1", "--tokens", "0"});
  ASSERT_EQ(chat.exit_code, 0) << chat.err;
  EXPECT_NE(chat.out.find(", document 1 of 2: "), std::string::npos) << chat.out;
  EXPECT_NE(chat.out.find("context  \"<|im_start|>user\\nWhat is it?<|im_end|>\\n<|im_start|>assistant\\n\"\n"),
            std::string::npos)
      << chat.out;
  EXPECT_NE(chat.out.find("target   \"A day.<|im_end|>\"\n"), std::string::npos) << chat.out;
  // Of plain text everything counts but the first token; a long part is shown from both ends.
  const ProgramResult both = run_program({"data", "show", path("out"), "--count", "9", "--tokens", "2"});
  ASSERT_EQ(both.exit_code, 0) << both.err;
  EXPECT_NE(both.out.find(", document 0 of 2: "), std::string::npos) << both.out;
  EXPECT_NE(both.out.find("\n       0        0  context  "), std::string::npos) << both.out;
  EXPECT_NE(both.out.find(" ... "), std::string::npos) << both.out;
  const ProgramResult beyond = run_program({"data", "show", path("out"), "--document", "2"});
  EXPECT_EQ(beyond.exit_code, 2);
  EXPECT_NE(beyond.err.find("has documents 0 to 1"), std::string::npos) << beyond.err;
}

// What a document holds reaches no terminal as a command: ESC, DEL, and CSI as one character.
TEST_F(DataCommand, ShowEscapesWhatTerminalsObey) {
  const std::string tokenizer = "tests/data/tokenizer_qwen2_style";
  write("a.jsonl", "{\"text\": \"a\\u001b[31m \\u007f \\u009b31m \\u0085 caf\\u00e9 \\u4e00\\u00a0.\"}\n");
  const ProgramResult made =
      run_program({"data", "tokenize", "--tokenizer", tokenizer, "--input", path("a.jsonl"), "--output", path("out")});
  if (made.err.find("this build has no tokenizer") != std::string::npos) GTEST_SKIP() << made.err;
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const ProgramResult shown = run_program({"data", "show", path("out"), "--tokenizer", tokenizer});
  ASSERT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_NE(shown.out.find("\\u001b[31m \\u007f \\u009b31m \\u0085 caf\u00e9 \u4e00\u00a0.\""), std::string::npos)
      << shown.out;
}

TEST(TimeLeft, CountsOnlyWhatThisRunDid) {
  EXPECT_EQ(time_left(0.0, 0.25, 30.0), "1m30s left");
  EXPECT_EQ(time_left(0.5, 0.75, 30.0), "30s left");
  EXPECT_EQ(time_left(0.5, 0.5, 30.0), "");
}

TEST_F(DataCommand, WrongArguments) {
  EXPECT_EQ(run_program({"data", "check"}).exit_code, 2);
  EXPECT_EQ(run_program({"data"}).exit_code, 2);
  EXPECT_EQ(run_program({"data", "stats"}).exit_code, 2);
  EXPECT_EQ(run_program({"data", "stats", path("none")}).exit_code, 2);
  EXPECT_EQ(run_program({"data", "tokenize"}).exit_code, 2);
  EXPECT_EQ(run_program({"data", "synth", "--task", "none", "--output", path("x")}).exit_code, 2);
}

}  // namespace
}  // namespace sb::test
