#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"

namespace sb::testing {
namespace {

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
  const std::string earlier = "some of it could not be written; is the disk full?";
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

TEST_F(Cli, SimulatesARing) {
  const std::string json = (directory_ / "ring.json").string();
  const ProgramResult result = run_program({"simulate", "--ring", "--cp", "4", "--node-size", "2", "--ring-tokens",
                                            "32768", "--placement", "striped,triangular", "--json", json});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* part : {"ring of 4 ranks in machines of 2", "striped", "triangular", "lock-step", "exposed"})
    EXPECT_NE(result.out.find(part), std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("zigzag"), std::string::npos);
  std::ifstream file(json);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("hierarchical_exposed_ms"), std::string::npos) << text;
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{"--ring"},
                                             {"--ring", "--cp", "100000"},
                                             {"--cp", "4097"},
                                             {"--ring", "--cp", "4", "--node-size", "3"},
                                             {"--ring", "--cp", "4", "--placement", "round"},
                                             {"--ring", "--cp", "4", "--block", "200"},
                                             {"--ring", "--cp", "4", "--block", "0"},
                                             {"--ring", "--cp", "4", "--ring-index", "no-such-file"},
                                             {"--ring", "--cp", "4", "--ring-times", "1,2"}}) {
    std::vector<std::string> arguments = {"simulate"};
    arguments.insert(arguments.end(), wrong.begin(), wrong.end());
    const ProgramResult refused = run_program(arguments);
    EXPECT_EQ(refused.exit_code, 2) << wrong.back();
    EXPECT_EQ(refused.out, "");
  }
}

TEST_F(Cli, SimulateTakesPartsThatDivideTheBlock) {
  const auto simulate = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"simulate", "--model",    "qwen2.5-0.5b", "--steps",
                                          "1",        "--policies", "in_order"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  };
  const ProgramResult whole = simulate({}),
                      same = simulate({"--score-tokens", "128", "--json", (directory_ / "rows.json").string()});
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_NE(same.out.find("block 128, score tokens 128"), std::string::npos) << same.out;
  std::ifstream file(directory_ / "rows.json");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("\"score_tokens\": 128"), std::string::npos) << text;
  for (const char* value : {"-1", "48"}) {
    const ProgramResult refused = simulate({"--score-tokens", value});
    EXPECT_EQ(refused.exit_code, 2) << value;
    EXPECT_EQ(refused.out, "");
    EXPECT_NE(refused.err.find("--score-tokens"), std::string::npos) << refused.err;
    EXPECT_NE(refused.err.find("does not divide"), std::string::npos) << refused.err;
  }
}

// 64 workers, at most 16 sequences a step.
TEST_F(Cli, SimulateSweepsLayoutsAndSaysWhatBalancingGives) {
  const std::string json = (directory_ / "layouts.json").string();
  const ProgramResult sweep = run_program({"simulate", "--model", "qwen2.5-0.5b", "--sweep", "--gpus", "64", "--max-cp",
                                           "2", "--steps", "2", "--json", json});
  ASSERT_EQ(sweep.exit_code, 0) << sweep.err;
  EXPECT_EQ(sweep.out.find("dp 1 x pp 1 x cp 1"), std::string::npos) << sweep.out;
  EXPECT_NE(sweep.out.find("layouts of 64 workers of 139 GiB"), std::string::npos) << sweep.out;
  EXPECT_NE(sweep.out.find("dp is at most the global batch of 16"), std::string::npos) << sweep.out;
  // The last lines name a layout and how to go on; what is predicted there is what the table of policies has.
  const size_t at = sweep.out.find("the same with --dp ");
  ASSERT_NE(at, std::string::npos) << sweep.out;
  int dp = 0, pp = 0, cp = 0;
  ASSERT_EQ(std::sscanf(sweep.out.c_str() + at, "the same with --dp %d --pp %d --cp %d", &dp, &pp, &cp), 3);
  EXPECT_EQ(dp * pp * cp, 64);
  const std::string rows = (directory_ / "rows.json").string();
  const ProgramResult one =
      run_program({"simulate", "--model", "qwen2.5-0.5b", "--dp", std::to_string(dp), "--pp", std::to_string(pp),
                   "--cp", std::to_string(cp), "--steps", "2", "--policies", "sab+order+optimal", "--json", rows});
  ASSERT_EQ(one.exit_code, 0) << one.err;
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return nlohmann::json::parse(file);
  };
  const nlohmann::json policies = read(rows), layouts = read(json), &policy = policies["rows"][0];
  EXPECT_GT(policy["speedup"], 1.0);
  bool found = false;
  for (const nlohmann::json& layout : layouts["layouts"]) {
    EXPECT_LE(layout["dp"], 16);
    if (layout["dp"] != dp || layout["pp"] != pp) continue;
    found = true;
    EXPECT_EQ(layout["makespan_ms"], policy["makespan_ms"]);
    EXPECT_EQ(layout["speedup"], policy["speedup"]);
  }
  EXPECT_TRUE(found);
}

// Tokens and time of a step are means over the same steps.
TEST_F(Cli, ASweepCountsTheTokensOfAllSteps) {
  const auto tokens = [&](const char* steps) {
    const std::string json = (directory_ / "layouts.json").string();
    const ProgramResult sweep = run_program({"simulate", "--model", "qwen2.5-0.5b", "--sweep", "--gpus", "1",
                                             "--global-batch", "1", "--steps", steps, "--json", json});
    EXPECT_EQ(sweep.exit_code, 0) << sweep.err;
    std::ifstream file(json);
    const nlohmann::json row = nlohmann::json::parse(file)["layouts"][0];
    return row["tokens_per_second"].get<double>() * row["makespan_ms"].get<double>() / 1e3 * std::stod(steps);
  };
  const double before = tokens("40"), last = tokens("41") - before;
  EXPECT_NEAR(last, std::round(last), 1e-3);
  EXPECT_GE(last, 1);
  EXPECT_NE(std::round(last), std::round(before / 40));
}

TEST_F(Cli, SimulateRefusesOptionsThatWouldHaveNoEffect) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--gpus", "64"}, "--gpus says what --sweep tries; add --sweep"},
      {{"--sweep", "--gpus", "64", "--dp", "8"}, "--gpus and --dp both say how many workers there are"},
      {{"--sweep", "--policies", "sab"}, "--policies has no effect with --sweep"},
      {{"--sweep", "--svg", "a.svg"}, "--svg has no effect with --sweep"},
      {{"--ring", "--cp", "8", "--trace", "a.json"}, "--trace has no effect with --ring"},
      {{"--placement", "striped"}, "--placement is about the ring of --cp ranks; set --cp"},
  };
  for (const auto& [arguments, message] : cases) {
    std::vector<std::string> all = {"simulate"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProgramResult refused = run_program(all);
    EXPECT_EQ(refused.exit_code, 2) << message;
    EXPECT_NE(refused.err.find(message), std::string::npos) << refused.err;
  }
}

TEST_F(Cli, SimulateTakesDenseLayers) {
  const std::string json = (directory_ / "rows.json").string();
  const auto step_ms = [&](const std::string& layers) {
    std::vector<std::string> arguments = {"simulate",   "--model",  "qwen2.5-0.5b", "--steps", "2",
                                          "--policies", "in_order", "--json",       json};
    if (!layers.empty()) arguments.insert(arguments.end(), {"--dense-layers", layers});
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::ifstream file(json);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const size_t at = text.find("\"makespan_ms\": ");
    EXPECT_NE(at, std::string::npos) << text;
    return std::stod(text.substr(at + 15));
  };
  const double none = step_ms(""), one = step_ms("3"), two = step_ms("3,0,3");
  EXPECT_GT(one, none);
  EXPECT_NEAR(two - none, 2 * (one - none), 1e-6 * two);  // one stage: all layers alike
  std::ifstream file(json);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("\"dense_layers\": ["), std::string::npos) << text;
  const ProgramResult refused = run_program({"simulate", "--model", "qwen2.5-0.5b", "--dense-layers", "24"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--dense-layers: 24, but the model has layers 0 to 23"), std::string::npos) << refused.err;
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
                               " is not a decimal integer of 64 bits (see sparsebalance simulate --help)\n");
  }
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
       "error: sparsebalance bench: A subcommand is required; known are attention (see sparsebalance bench --help)\n"},
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
  EXPECT_NE(far.err.find("known are train, "), std::string::npos) << far.err;
}

// Of copy only the second half counts, here the positions from 1,024 on.
TEST_F(Cli, PerplexityOfPositionsWithoutTargetsIsNone) {
  const std::string data = (directory_ / "copy").string(), json = (directory_ / "ppl.json").string();
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--length", "2048", "--sequences", "1", "--vocab-size",
                         "64", "--output", data})
                .exit_code,
            0);
  const ProgramResult result =
      run_program({"eval", "ppl", "--model", "tests/data/hf/qwen2_tied", "--data", data, "--json", json});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("            0-1023            0          -            -\n"), std::string::npos)
      << result.out;
  std::ifstream file(json);
  const nlohmann::json rows = nlohmann::json::parse(file)["rows"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_TRUE(rows[0]["loss"].is_null());
  EXPECT_TRUE(rows[0]["perplexity"].is_null());
  EXPECT_GT(rows[1]["tokens"], 0);
  EXPECT_GT(rows[1]["loss"], 0.0);
  EXPECT_EQ(rows[2]["loss"], rows[1]["loss"]);
}

TEST_F(Cli, EvalWritesResultsOfAModelWhoseNameIsNoText) {
  const std::string model = (directory_ / "caf\xe9").string(), json = (directory_ / "answer.json").string();
  std::filesystem::copy("tests/data/hf/qwen2_tied", model);
  const ProgramResult result = run_program({"eval", "generate", "--model", model, "--token-ids", "--prompt", "1 2",
                                            "--max-new-tokens", "2", "--json", json});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::ifstream file(json);
  const nlohmann::json answer = nlohmann::json::parse(file);
  EXPECT_EQ(answer["model"], (directory_ / "caf\ufffd").string());
  EXPECT_EQ(answer["rows"][0]["tokens"].size(), 2u);
}

TEST_F(Cli, EvalOfARunsFolderNamesTheModelInIt) {
  std::filesystem::create_directories(directory_ / "final");
  write("final/config.json", "{}");
  const ProgramResult result = run_program({"eval", "needle", "--model", directory_.string()});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find((directory_ / "final").string()), std::string::npos) << result.err;
}

TEST_F(Cli, EvalRefusesOptionsThatDoNotFitTheModel) {
  const std::string run = (directory_ / "run").string(), model = run + "/final";
  const ProgramResult trained = run_program({"train", run_file(), "--set", "train.output_dir=" + run, "--set",
                                             "train.max_steps=1", "--set", "batch.global_batch_size=1"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const std::vector<std::string> needle = {"eval", "needle", "--model", model, "--lengths", "64", "--samples", "1"};
  const auto error_with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = needle;
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, result.err.empty() ? 0 : 2) << result.err;
    return result.err;
  };
  EXPECT_EQ(error_with({"--vocab", "64"}), "");
  EXPECT_EQ(error_with({"--vocab", "65"}), "error: --vocab 65: the model's vocabulary has 64\n");
  EXPECT_NE(error_with({"--vocab", "-1"}).find("--vocab: -1 is below 0"), std::string::npos);
  EXPECT_NE(error_with({"--run-config", run + "/run.yaml"}).find("is for --attention as-trained"), std::string::npos);
  EXPECT_EQ(error_with({"--attention", "as-trained", "--run-config", run + "/run.yaml"}), "");
  const ProgramResult words = run_program({"eval", "generate", "--model", model, "--token-ids", "--prompt", "1 two"});
  EXPECT_EQ(words.exit_code, 2);
  EXPECT_NE(words.err.find("--prompt \"1 two\": with --token-ids a prompt is numbers"), std::string::npos) << words.err;
  const ProgramResult sampled =
      run_program({"eval", "generate", "--model", model, "--token-ids", "--prompt", "1 2", "--temperature", "nan"});
  EXPECT_EQ(sampled.exit_code, 2);
  EXPECT_NE(sampled.err.find("--temperature nan --top-p 1: both must be numbers"), std::string::npos) << sampled.err;
}

// Measuring takes long: what cannot be is said before it begins.
TEST_F(Cli, MeasurementsRefuseWrongOptionsAtOnce) {
  const std::string run = run_file(), out = (directory_ / "profile.json").string();
  const std::string heads = "model: {init: {vocab_size: 64, head_dim: 24}}\ndata: {synthetic: {vocab_size: 64}}\n";
  const std::string on_cpu = write("on_cpu.yaml", heads), on_gpu = write("on_gpu.yaml", "device: cuda\n" + heads);
  const char *two_layers = "--layers: three layers or more", *no_kernel = "head_dim is 24, and on GPUs";
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"bench", "attention", "--pattern", "nonsense"}, "nonsense"},
      {{"bench", "attention", "--block", "0"}, "attention.block: 0 tokens"},
      {{"bench", "attention", "--seq", "64", "0"}, "--seq 0: 1 to 16,777,216 tokens work"},
      {{"bench", "attention", "--density", "0.1", "1.5"}, "--density 1.5 is not in (0, 1]"},
      {{"bench", "attention", "--density", "nan"}, "--density nan is not in (0, 1]"},
      {{"bench", "attention", "--heads", "3"}, "--heads 3 is no multiple of --kv-heads 2"},
      {{"profile", "--out", out, "--max-tokens", "0"}, "--max-tokens: 0 is below 1"},
      {{"profile", "--out", out, "--layers", "2"}, two_layers},
      {{"profile", "--out", out, "--run", on_gpu}, no_kernel},
      {{"profile", "--out", out, "--run", on_gpu, "--device", "cpu", "--layers", "2"}, two_layers},
      {{"profile", "--out", out, "--run", on_cpu, "--device", "cuda"}, no_kernel},
      {{"profile", "--out", out, "--run", run, "--budget", "512"}, "--budget: --run "},
      {{"profile", "--out", out, "--run", run, "--model", "qwen2.5-3b"}, "--model: --run "},
  };
  for (const auto& [arguments, message] : cases) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_EQ(result.out, "") << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

// Before a model is loaded, which these folders do not even hold, and before a GPU is looked for.
TEST_F(Cli, HeadsWithoutAKernelOnGpusAreRefusedAtOnce) {
  const auto model_with = [&](const std::string& name, int head_dim) {
    std::filesystem::create_directories(directory_ / name);
    write(name + "/config.json", R"({"model_type": "llama", "hidden_size": 160, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": true, "head_dim": )" +
                                     std::to_string(head_dim) + "}");
    return (directory_ / name).string();
  };
  const std::string odd = model_with("odd", 24), wide = model_with("wide", 300);
  const std::string begin = "/config.json: head_dim is ",
                    few = "and on GPUs attention in bf16 has kernels for 16, 32, ";
  const std::string question = write("question.jsonl", "{\"input\": \"a\", \"outputs\": [\"b\"]}\n");
  const std::string task =
      write("task.jsonl", R"({"input": "", "context": "a", "answers": ["b"], "all_classes": [], "dataset": "qasper"})"
                          "\n");
  const std::vector<std::string> commands[] = {
      {"eval", "ppl", "--data", "none"},      {"eval", "needle"},
      {"eval", "ruler", "--input", question}, {"eval", "longbench", "--input", task},
      {"eval", "generate", "--prompt", "a"},
  };
  const auto error_with = [&](std::vector<std::string> arguments, const std::vector<std::string>& more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments[1];
    EXPECT_EQ(result.out, "") << arguments[1];
    return result.err;
  };
  for (const std::vector<std::string>& command : commands) {
    const std::string bf16 = error_with(command, {"--model", odd, "--device", "cuda"});
    EXPECT_NE(bf16.find(odd + begin + "24, " + few), std::string::npos) << bf16;
    EXPECT_NE(bf16.find("; use --precision float32\n"), std::string::npos) << bf16;
    const std::string any = error_with(command, {"--model", wide, "--device", "cuda", "--precision", "float32"});
    EXPECT_NE(any.find(wide + begin + "300, and on GPUs attention has kernels up to 256; use --device cpu\n"),
              std::string::npos)
        << any;
    EXPECT_EQ(error_with(command, {"--model", wide}).find("head_dim"), std::string::npos);
  }

  const std::vector<std::string> profile = {"profile", "--out", (directory_ / "profile.json").string()};
  const std::string measured_in_bf16 = "; profiles are measured in bf16 there: name another model, or use --device cpu";
  const std::string named = error_with(profile, {"--model", odd, "--device", "cuda"});
  EXPECT_NE(named.find(odd + ": head_dim is 24, " + few), std::string::npos) << named;
  EXPECT_NE(named.find(measured_in_bf16), std::string::npos) << named;
  const std::string run = write("fp32.yaml",
                                "device: cuda\nmodel: {init: {vocab_size: 64, head_dim: 24}}\n"
                                "data: {synthetic: {vocab_size: 64}}\ntrain: {precision: float32}\n");
  const std::string of_run = error_with(profile, {"--run", run});
  EXPECT_NE(of_run.find(run + ": head_dim is 24, " + few), std::string::npos) << of_run;
  EXPECT_NE(of_run.find(measured_in_bf16), std::string::npos) << of_run;
}

TEST_F(Cli, EvalSaysWhatIsMissing) {
  const std::string questions = write("q.jsonl", "{\"input\": \"a\", \"outputs\": [\"b\"]}\n");
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--input", questions}, "name a --model to run, or --predictions to score"},
      {{"--input", questions, "--predictions", write("two.jsonl", "{\"pred\": \"b\"}\n{\"pred\": \"b\"}\n")},
       "two.jsonl: 2 predictions for 1 lines"},
      {{"--input", write("empty.jsonl", " \n\n")}, "empty.jsonl: holds no lines"},
      {{"--input", write("list.jsonl", "[1]\n")}, "list.jsonl:1: not a JSON object"},
      {{"--input", write("cut.jsonl", "{\"input\": \n")}, "cut.jsonl:1: not a JSON object"},
      {{"--input", (directory_ / "none.jsonl").string()}, "none.jsonl: cannot be read"},
  };
  for (const auto& [options, message] : cases) {
    std::vector<std::string> arguments = {"eval", "ruler"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

TEST_F(Cli, EvalNamesTheLineOfAFile) {
  const std::string questions = write("q.jsonl", "\n \n{\"input\": \"a\", \"outputs\": [\"b\"]}\n\n{\"input\": 3}\n");
  const std::string answers = write("a.jsonl", "{\"pred\": \"b\"}\n\n{}\n");
  const ProgramResult question = run_program({"eval", "ruler", "--input", questions, "--predictions", answers});
  EXPECT_EQ(question.exit_code, 2);
  EXPECT_NE(question.err.find("q.jsonl:5: key \"input\""), std::string::npos) << question.err;
  write("q.jsonl", "\n{\"input\": \"a\", \"outputs\": [\"b\"]}\n\n{\"input\": \"c\", \"outputs\": [\"d\"]}\n");
  const ProgramResult answer = run_program({"eval", "ruler", "--input", questions, "--predictions", answers});
  EXPECT_EQ(answer.exit_code, 2);
  EXPECT_NE(answer.err.find("a.jsonl:3: key \"pred\""), std::string::npos) << answer.err;
  // Before a model runs for hours.
  write("q.jsonl", "\n{\"input\": \"a\", \"outputs\": [\"b\"]}\n\n{\"input\": \"c\", \"outputs\": []}\n");
  const ProgramResult empty = run_program({"eval", "ruler", "--input", questions, "--model", directory_.string()});
  EXPECT_EQ(empty.exit_code, 2);
  EXPECT_NE(empty.err.find("q.jsonl:4: \"outputs\" is empty"), std::string::npos) << empty.err;
}

TEST_F(Cli, LongBenchNamesTheTaskThatItsFilesLack) {
  const std::string questions =
      write("q.jsonl", "{\"context\": \"c\", \"input\": \"i\", \"answers\": [\"yes\"], \"dataset\": \"qasper\"}\n");
  const std::string answers = write("a.jsonl", "{\"pred\": \"yes\"}\n");
  const std::string prompts = write("dataset2prompt.json", "{\"lcc\": \"{context}\"}");
  const std::vector<std::string> score = {"eval", "longbench", "--input", questions, "--predictions", answers};
  const ProgramResult scored = run_program(score);
  EXPECT_EQ(scored.exit_code, 0) << scored.err;
  EXPECT_NE(scored.out.find("100.00 over 1 samples"), std::string::npos) << scored.out;
  std::vector<std::string> asked = score;
  asked.insert(asked.end(), {"--prompts", prompts});
  const ProgramResult lacking = run_program(asked);
  EXPECT_EQ(lacking.exit_code, 2);
  EXPECT_NE(lacking.err.find("dataset2prompt.json: no template for the task \"qasper\" of"), std::string::npos)
      << lacking.err;
}

TEST_F(Cli, AModelsConfigOfWrongTypesIsTheUsersError) {
  const std::string config =
      write("config.json",
            "{\"num_hidden_layers\": 2, \"hidden_size\": 64, \"num_attention_heads\": 2, \"intermediate_size\": 128, "
            "\"vocab_size\": 100, \"tie_word_embeddings\": \"yes\"}");
  const ProgramResult result = run_program({"simulate", "--model", config});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("tie_word_embeddings"), std::string::npos) << result.err;
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
}  // namespace sb::testing
