#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

TEST_F(Cli, HelpAndVersion) {
  const ProgramResult help = run_program({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_NE(help.out.find("config"), std::string::npos);
  EXPECT_EQ(help.err, "");
  const ProgramResult version = run_program({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out.find("sparsebalance "), 0U) << version.out;
  EXPECT_NE(version.out.find(" CUDA"), std::string::npos) << version.out;
  EXPECT_EQ(run_program({"config", "--help"}).exit_code, 0);
}

// By hand, from the options' declarations: what stands for a value, its range, its default, and what it goes with.
TEST_F(Cli, HelpSaysRangesAndDefaultsInColumnsThatFit) {
  struct Case {
    std::vector<std::string> command;
    std::vector<const char*> parts;
  };
  const std::vector<Case> cases = {
      {{"init"}, {"--ranks INT ", "(default: one per GPU; 1 to 4096)\n", "--out TEXT ", "(default: run.yaml)\n"}},
      {{"train"}, {"--ranks INT ", "(1 to 4096)\n", "run.yaml ", "configuration of the run (required)\n"}},
      {{"data", "tokenize"},
       {"--tokenizer TEXT ", "--output PREFIX ", "--no-end-token  ", "(not with --no-end-token)\n"}},
      {{"data", "synth"}, {"--seed INT ", "(default: 1)\n", "needs --text)\n"}},
      {{"eval", "needle"},
       {"--device {cpu,cuda} ", "(default: cpu)\n", "--lengths INT ...", "(default: 1024,2048,4096)"}},
      {{"simulate"}, {"--comm {on,off} ", "--ring-times FLOAT x 3 ", "--max-cp INT ", "(at least 1; default: 8)\n"}},
      {{"profile"}, {"--run FILE ", "--recompute {none,attention,layer}\n"}},
      {{"report"}, {"run  ", "(required)\n"}}};
  for (const auto& [command, parts] : cases) {
    std::vector<std::string> words = command;
    words.emplace_back("--help");
    const ProgramResult help = run_program(words);
    ASSERT_EQ(help.exit_code, 0) << help.err;
    for (const char* part : parts) EXPECT_NE(help.out.find(part), std::string::npos) << part << " in\n" << help.out;
    std::string example = "\nExample: sparsebalance";
    for (const std::string& word : command) example += " " + word;
    EXPECT_NE(help.out.find(example + " "), std::string::npos) << help.out;
    std::istringstream lines(help.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 124u) << line;  // × and · have two bytes
  }
}

TEST_F(Cli, WrongArgumentsAreTheUsersError) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"no-such-command"},
                                             {"config", "--no-such-option"},
                                             {"config"},
                                             {"--log-level", "loud", "config", "--markdown"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_NE(result.err, "");
  }
}

TEST_F(Cli, TheLogLevelMayStandAnywhere) {
  const std::string run = run_file();
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"--log-level", "error", "config", run},
                                             {"config", "--log-level=error", run},
                                             {"config", run, "--log-level", "error"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"config", run, "--log-level", "loud"}, {"config", run, "--log-level"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find("--log-level"), std::string::npos) << result.err;
  }
}

TEST_F(Cli, WhatTheMachineSaysAboutAPathIsNoInternalError) {
  const std::string loop = (directory_ / "loop").string(), name(300, 'x');
  std::filesystem::create_symlink("loop", loop);
  for (const std::string& path : {loop + "/data", name}) {
    const ProgramResult result = run_program({"data", "stats", path});
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(result.err.rfind("error: " + path, 0), 0u) << result.err;
  }
}

// Not after the work whose result it is to hold.
TEST_F(Cli, AnOutputThatCannotBeWrittenIsRefusedAtOnce) {
  const std::string nowhere = (directory_ / "none" / "out.json").string();
  const std::string model = directory_.string();
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"profile", "--out", nowhere},
                                             {"simulate", "--json", nowhere},
                                             {"simulate", "--svg", nowhere},
                                             {"bench", "attention", "--json", nowhere},
                                             {"eval", "needle", "--model", model, "--json", nowhere},
                                             {"eval", "needle", "--model", model, "--svg", nowhere}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[0];
    EXPECT_EQ(result.out, "") << arguments[0];
    EXPECT_EQ(result.err, "error: " + nowhere + ": cannot be written: No such file or directory\n");
  }
}

// Whether the end of the program writes what was printed, or a full buffer or the command does so before.
TEST_F(Cli, AnOutputThatDoesNotArriveIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const std::string tokens = (directory_ / "tokens").string();
  ASSERT_EQ(run_program({"data", "synth", "--sequences", "64", "--length", "64", "--output", tokens}).exit_code, 0);
  const auto expect_error = [](const std::vector<std::string>& command, const std::string& reason) {
    const ProgramResult result = run_program_into_full_device(command);
    EXPECT_EQ(result.exit_code, 2) << command.back();
    EXPECT_EQ(result.err, "error: standard output: " + reason + "\n") << command.back();
  };
  const std::string full = "cannot be written: No space left on device";
  expect_error({"data", "show", tokens}, full);
  expect_error({"data", "show", tokens, "--count", "64"}, full);
  expect_error({"data", "stats", tokens}, full);
  expect_error({"data", "stats", "--json", tokens}, full);
  expect_error({"--help"}, full);
  const std::string earlier = "could not be written completely; is the disk full?";
  expect_error({"data", "check", tokens}, earlier);
  expect_error({"config", "--markdown"}, earlier);
  expect_error({"--version"}, earlier);
  // What the command itself says comes first.
  const ProgramResult wrong = run_program_into_full_device({"data", "show", tokens, "--document", "64"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.err.find("has documents 0 to 63"), std::string::npos) << wrong.err;
}

TEST_F(Cli, ARunDoesNotEndWithWhoReadsItsOutput) {
  const std::string output = (directory_ / "run").string();
  const ProgramResult result = run_program_into_broken_pipe(
      {"train", run_file(), "--set", "train.max_steps=1", "--set", "train.output_dir=" + output});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("error: standard output: "), std::string::npos) << result.err;
  EXPECT_TRUE(std::filesystem::exists(output + "/final"));
  // Others do, as programs in a pipe do.
  EXPECT_EQ(run_program_into_broken_pipe({"config", "--markdown"}).exit_code, 128 + SIGPIPE);
}

// Nor does what is printed get into files that are opened meanwhile, which would have the numbers of the closed
// streams.
TEST_F(Cli, WhatIsPrintedToAClosedStreamIsInNoFile) {
  const std::string output = (directory_ / "run").string();
  EXPECT_EQ(run_program_without_streams({"train", run_file(), "--set", "train.max_steps=1", "--set",
                                         "train.validation_sequences=1", "--set", "train.output_dir=" + output}),
            2);
  EXPECT_EQ(std::filesystem::file_size(output + "/.lock"), 0u);
  int lines = 0;
  std::ifstream metrics(output + "/metrics.jsonl");
  for (std::string line; std::getline(metrics, line); ++lines) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  EXPECT_EQ(lines, 3);  // validation, a step, validation
  EXPECT_TRUE(std::filesystem::exists(output + "/final"));
}

TEST_F(Cli, ProfileRefusesNumbersThatMeasureNothing) {
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{"--repeats", "0"}, {"--held-out", "-2"}, {"--threads", "-1"}}) {
    const ProgramResult refused = run_program(
        {"profile", "--max-tokens", "128", "--out", (directory_ / "profile.json").string(), wrong[0], wrong[1]});
    EXPECT_EQ(refused.exit_code, 2) << wrong[0] << refused.err;
    EXPECT_NE(refused.err.find(wrong[0]), std::string::npos) << refused.err;
  }
}

TEST_F(Cli, NumbersThatAreTooSmallAreNamedWithTheLeast) {
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{"simulate", "--micro-batch-sequences", "0"},
                                             {"simulate", "--max-length", "0"},
                                             {"simulate", "--ring-tokens", "0"}})
    EXPECT_EQ(run_program(wrong).err,
              "error: sparsebalance simulate: " + wrong[1] + ": 0 is below 1 (see sparsebalance simulate --help)\n");
  for (const std::string text : {"0x0", "+0", "-0x1", "x", "1e3", "99999999999999999999"}) {
    const ProgramResult refused = run_program({"simulate", "--gpus", text});
    EXPECT_EQ(refused.exit_code, 2) << text;
    EXPECT_EQ(refused.err, "error: sparsebalance simulate: --gpus: " + text +
                               " is not a 64-bit decimal integer (see sparsebalance simulate --help)\n");
  }
}

TEST_F(Cli, NumbersThatDoNotFitAreRefusedAndNotClamped) {
  const std::string huge = "999999999999999999999";
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{
           {"simulate", "--steps", huge},
           {"simulate", "--seed", "-1"},
           {"simulate", "--budget", "0x100"},
           {"simulate", "--p", "1e999"},
           {"data", "synth", "--output", "x", "--seed", "-1"},
           {"data", "synth", "--output", "x", "--length", huge},
           {"data", "lengths", "--pool", "chatqa2-like", "--output", "x", "--seed", "18446744073709551616"},
           {"bench", "attention", "--seq", huge}}) {
    const ProgramResult refused = run_program(wrong);
    EXPECT_EQ(refused.exit_code, 2) << refused.err;
    EXPECT_NE(refused.err.find(wrong[wrong.size() - 2] + ": " + wrong.back() + " is not"), std::string::npos)
        << refused.err;
  }
}

TEST_F(Cli, AnEmptyOutputIsRefused) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"data", "tokenize", "--tokenizer", "x", "--input", "x", "--output", ""},
                                             {"data", "synth", "--output", ""}}) {
    const ProgramResult refused = run_program(command);
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_NE(refused.err.find("--output"), std::string::npos) << refused.err;
  }
}

TEST_F(Cli, WhatTrainingRefusesIsRefusedByConfig) {
  const std::string file =
      write("small.yaml",
            "model: {init: {vocab_size: 64}}\ndata: {synthetic: {vocab_size: 64, length: 2048}}\n"
            "attention: {pattern: topk, budget: 256}\nbalance: {batching: sab, profile: h200-analytic}\n");
  const ProgramResult refused = run_program({"config", file});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("small.yaml:3: attention.budget: 256 is below 1 sink + 2 local + 2 blocks of 128 tokens"),
            std::string::npos)
      << refused.err;
}

TEST_F(Cli, ArgumentsThatDoNotFitAreOneLineWithTheHelpToRead) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"train", "run.yaml", "--rank", "2"},
       "error: unknown option '--rank'; did you mean '--ranks'? (see sparsebalance train --help)\n"},
      {{"train", "run.yaml", "--rank=2"},
       "error: unknown option '--rank'; did you mean '--ranks'? (see sparsebalance train --help)\n"},
      {{"data", "stats", "--zzzzzz"}, "error: unknown option '--zzzzzz' (see sparsebalance data stats --help)\n"},
      {{"train"}, "error: sparsebalance train: run.yaml is required (see sparsebalance train --help)\n"},
      {{"eval", "pl", "--model", "x"},
       "error: unknown command 'pl'; did you mean 'ppl'? (see sparsebalance eval --help)\n"},
      {{"bench"},
       "error: sparsebalance bench: A subcommand is required; choose from attention (see sparsebalance bench "
       "--help)\n"},
  };
  for (const auto& [arguments, message] : cases) EXPECT_EQ(run_program(arguments).err, message);
  const ProgramResult level = run_program({"config", "--log-level", "loud"});
  EXPECT_NE(level.err.find("--log-level: loud not in {debug,info,warning,error}"), std::string::npos) << level.err;
}

TEST_F(Cli, UnknownCommandsNameTheNearest) {
  const ProgramResult first = run_program({"--log-level", "debug", "trian"});
  EXPECT_EQ(first.exit_code, 2);
  EXPECT_NE(first.err.find("unknown command 'trian'; did you mean 'train'?"), std::string::npos) << first.err;
  const ProgramResult second = run_program({"data", "tokenise"});
  EXPECT_EQ(second.exit_code, 2);
  EXPECT_NE(second.err.find("'tokenise'; did you mean 'tokenize'?"), std::string::npos) << second.err;
  const ProgramResult far = run_program({"frobnicate"});
  EXPECT_NE(far.err.find("choose from init, train, "), std::string::npos) << far.err;
}

// Measuring takes long: what cannot be is said before it begins.
TEST_F(Cli, MeasurementsRefuseWrongOptionsAtOnce) {
  const std::string run = run_file(), out = (directory_ / "profile.json").string();
  const std::string heads = "model: {init: {vocab_size: 64, head_dim: 24}}\ndata: {synthetic: {vocab_size: 64}}\n";
  const std::string on_cpu = write("on_cpu.yaml", heads), on_gpu = write("on_gpu.yaml", "device: cuda\n" + heads);
  const char *two_layers = "--layers: at least three are needed", *no_kernel = "head_dim is 24, and on GPUs";
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"bench", "attention", "--pattern", "nonsense"}, "nonsense"},
      {{"bench", "attention", "--block", "0"}, "attention.block: 0 tokens"},
      {{"bench", "attention", "--seq", "64", "0"}, "--seq 0: must be between 1 and 16,777,216 tokens"},
      {{"bench", "attention", "--density", "0.1", "1.5"}, "--density 1.5: must be above 0 and at most 1"},
      {{"bench", "attention", "--density", "nan"}, "--density nan: must be above 0 and at most 1"},
      {{"bench", "attention", "--score", "planes", "--score-channels", "31"},
       "attention.score_channels: 31; must be an even number"},
      {{"bench", "attention", "--score", "planes", "--score-channels", "66"},
       "attention.score_channels: 66, but the model's heads have 64 channels"},
      {{"bench", "attention", "--score", "planes", "--score-tokens", "1"},
       "attention.score_tokens: 1 has no effect with"},
      {{"bench", "attention", "--heads", "3"}, "--heads 3 is not a multiple of --kv-heads 2"},
      {{"profile", "--out", out, "--max-tokens", "0"}, "--max-tokens: 0 is below 1"},
      {{"profile", "--out", out, "--layers", "2"}, two_layers},
      {{"profile", "--out", out, "--run", on_gpu}, no_kernel},
      {{"profile", "--out", out, "--run", on_gpu, "--device", "cpu", "--layers", "2"}, two_layers},
      {{"profile", "--out", out, "--run", on_cpu, "--device", "cuda"}, no_kernel},
      {{"profile", "--out", out, "--run", run, "--budget", "512"}, "--budget: already set by --run "},
      {{"profile", "--out", out, "--run", run, "--model", "qwen2.5-3b"}, "--model: already set by --run "},
  };
  for (const auto& [arguments, message] : cases) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_EQ(result.out, "") << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

TEST_F(Cli, WhatNoRankCouldRunIsSaidOnce) {
  const ProgramResult result = run_program({"train", run_file(), "--set", "parallel.tp=3", "--ranks", "3"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(
      result.err,
      "error: parallel.tp: 3 ranks cannot divide the 4 attention heads of model.init equally; set it to a divisor\n");
}

TEST_F(Cli, ABudgetThatHoldsEverySequenceIsSaid) {
  std::vector<std::string> arguments = {"train", run_file()};
  for (const std::string& setting :
       {std::string("attention.pattern=window"), std::string("attention.block=64"), std::string("train.max_steps=1"),
        std::string("batch.global_batch_size=1"), std::string("train.validation_sequences=0"),
        "train.output_dir=" + (directory_ / "run").string()}) {
    arguments.insert(arguments.end(), {"--set", setting});
  }
  const ProgramResult roomy = run_program(arguments);
  EXPECT_EQ(roomy.exit_code, 0) << roomy.err;
  EXPECT_NE(roomy.err.find("lower attention.budget"), std::string::npos) << roomy.err;
  arguments.insert(arguments.end(),
                   {"--set", "attention.budget=64", "--set", "train.output_dir=" + (directory_ / "tight").string()});
  const ProgramResult tight = run_program(arguments);
  EXPECT_EQ(tight.exit_code, 0) << tight.err;
  EXPECT_EQ(tight.err.find("lower attention."), std::string::npos) << tight.err;
}

TEST_F(Cli, ConfigPrintsWhatLoadsAgain) {
  const ProgramResult first =
      run_program({"config", run_file(), "--set", "train.max_steps=7", "--set", "train.seed=3"});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_NE(first.out.find("  max_steps: 7\n"), std::string::npos);
  EXPECT_NE(first.out.find("  seed: 3\n"), std::string::npos);
  const ProgramResult second = run_program({"config", write("printed.yaml", first.out)});
  EXPECT_EQ(second.exit_code, 0) << second.err;
  EXPECT_EQ(second.out, first.out);
}

TEST_F(Cli, SetMayStandBeforeTheFile) {
  const ProgramResult result = run_program({"config", "--set", "train.max_steps=7", run_file()});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("  max_steps: 7\n"), std::string::npos);
}

TEST_F(Cli, ConfigErrorsAreOneLineWithExitCode2) {
  const ProgramResult unknown = run_program({"config", write("typo.yaml", "train:\n  max_step: 3\n")});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_EQ(unknown.out, "");
  EXPECT_EQ(unknown.err, "error: " + (directory_ / "typo.yaml").string() +
                             ":2: unknown key 'train.max_step'; did you mean 'train.max_steps'?\n");
  const ProgramResult missing = run_program({"config", (directory_ / "none.yaml").string()});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_NE(missing.err.find("none.yaml: cannot be opened"), std::string::npos);
}

TEST_F(Cli, PrintConfigTrainsNothing) {
  const std::string output = (directory_ / "out").string();
  const std::vector<std::string> set{"--set", "train.output_dir=" + output};
  const ProgramResult train = run_program({"train", run_file(), set[0], set[1], "--print-config"});
  ASSERT_EQ(train.exit_code, 0) << train.err;
  EXPECT_EQ(train.out, run_program({"config", run_file(), set[0], set[1]}).out);
  EXPECT_FALSE(std::filesystem::exists(output));
}

TEST_F(Cli, AModelThatDoesNotFitIsExitCode3WithThePlan) {
  const std::string output = (directory_ / "out").string();
  const ProgramResult result =
      run_program({"train", run_file(), "--set", "train.output_dir=" + output, "--set", "model.init.hidden_size=65536",
                   "--set", "model.init.head_dim=128", "--set", "model.init.num_hidden_layers=1024"});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_EQ(result.err.rfind("out of memory: ", 0), 0u) << result.err;
  EXPECT_NE(result.err.find("weights"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("batch.micro_batch_tokens"), std::string::npos) << "the cure: " << result.err;
}

TEST_F(Cli, MarkdownIsTheReference) {
  const ProgramResult result = run_program({"config", "--markdown"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.rfind("# Configuration\n", 0), 0u);
}

}  // namespace
}  // namespace sb::test
