#include <cstdio>
#include <nlohmann/json.hpp>

#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

class SimulateCommand : public Cli {};

TEST_F(SimulateCommand, SimulatesARing) {
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

TEST_F(SimulateCommand, LengthsComeFromEveryKindOfTokenFile) {
  const auto sequences = [&](const std::string& lengths) {
    const ProgramResult result =
        run_program({"simulate", "--lengths", lengths, "--steps", "1", "--policies", "in_order", "--no-frontier"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const size_t open = result.out.find(lengths + " (");
    return open == std::string::npos ? result.out : result.out.substr(open + lengths.size() + 2, 12);
  };
  for (const char* name : {"a", "b"})
    run_program({"data", "synth", "--task", "copy", "--length", "256", "--sequences", "3", "--vocab-size", "64",
                 "--output", (directory_ / name).string()});
  EXPECT_EQ(sequences((directory_ / "a").string()), "3 sequences)");
  EXPECT_EQ(sequences((directory_ / "*.bin").string()), "6 sequences)");
  // A folder of MDS shards: one sample of the tokens 7 and 8.
  std::filesystem::create_directories(directory_ / "mds");
  write("mds/index.json", R"({"shards": [{"column_names": ["input_ids"], "column_encodings": ["ndarray:uint16:2"],
                             "column_sizes": [4], "raw_data": {"basename": "s"}}]})");
  write("mds/s", std::string("\1\0\0\0\14\0\0\0\20\0\0\0\7\0\10\0", 16));
  EXPECT_EQ(sequences((directory_ / "mds").string()), "1 sequences)");
}

TEST_F(SimulateCommand, SimulateTakesPartsThatDivideTheBlock) {
  const auto simulate = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"simulate", "--model",    "qwen2.5-0.5b", "--steps",
                                          "1",        "--policies", "in_order"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  };
  const ProgramResult whole = simulate({}), same = simulate({"--score", "moments", "--score-tokens", "128", "--json",
                                                             (directory_ / "rows.json").string()});
  EXPECT_EQ(whole.exit_code, 0) << whole.err;
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_NE(whole.out.find("block 128, mass by planes,"), std::string::npos) << whole.out;
  EXPECT_NE(same.out.find("block 128, mass by moments, score tokens 128"), std::string::npos) << same.out;
  std::ifstream file(directory_ / "rows.json");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("\"score_tokens\": 128"), std::string::npos) << text;
  for (const char* value : {"-1", "48"}) {
    const ProgramResult refused = simulate({"--score", "moments", "--score-tokens", value});
    EXPECT_EQ(refused.exit_code, 2) << value;
    EXPECT_EQ(refused.out, "");
    EXPECT_NE(refused.err.find("--score-tokens"), std::string::npos) << refused.err;
    EXPECT_NE(refused.err.find("does not divide"), std::string::npos) << refused.err;
  }
  for (const std::vector<std::string>& wrong : std::vector<std::vector<std::string>>{
           {"--score-tokens", "1"}, {"--score", "mean", "--score-channels", "32"}, {"--score-channels", "33"}}) {
    const ProgramResult refused = simulate(wrong);
    EXPECT_EQ(refused.exit_code, 2) << wrong.back();
    EXPECT_NE(refused.err.find("--score-"), std::string::npos) << refused.err;
  }
}

// 64 workers, at most 16 sequences per step.
TEST_F(SimulateCommand, SimulateSweepsLayoutsAndSaysWhatBalancingGives) {
  const std::string json = (directory_ / "layouts.json").string();
  const ProgramResult sweep = run_program({"simulate", "--model", "qwen2.5-0.5b", "--sweep", "--gpus", "64", "--max-cp",
                                           "2", "--steps", "2", "--json", json});
  ASSERT_EQ(sweep.exit_code, 0) << sweep.err;
  EXPECT_EQ(sweep.out.find("dp 1 x pp 1 x tp 1 x cp 1"), std::string::npos) << sweep.out;
  EXPECT_NE(sweep.out.find("tensor parallelism: fastest with it "), std::string::npos) << sweep.out;
  EXPECT_NE(sweep.out.find("layouts of 64 workers with 139 GiB each"), std::string::npos) << sweep.out;
  EXPECT_NE(sweep.out.find("dp is limited to the global batch of 16"), std::string::npos) << sweep.out;
  // The last lines name a layout and how to go on; what is predicted there is what the table of policies has.
  const size_t at = sweep.out.find("pass --dp ");
  ASSERT_NE(at, std::string::npos) << sweep.out;
  int dp = 0, pp = 0, tp = 0, cp = 0;
  ASSERT_EQ(std::sscanf(sweep.out.c_str() + at, "pass --dp %d --pp %d --tp %d --cp %d", &dp, &pp, &tp, &cp), 4);
  EXPECT_EQ(dp * pp * tp * cp, 64);
  const size_t size_at = sweep.out.find("--micro-batch-sequences ", at);
  ASSERT_NE(size_at, std::string::npos) << sweep.out;
  const std::string size = std::to_string(std::atoi(sweep.out.c_str() + size_at + 24));
  EXPECT_NE(sweep.out.find("best against best"), std::string::npos) << sweep.out;
  const std::string rows = (directory_ / "rows.json").string();
  const ProgramResult one =
      run_program({"simulate", "--model", "qwen2.5-0.5b", "--dp", std::to_string(dp), "--pp", std::to_string(pp),
                   "--tp", std::to_string(tp), "--cp", std::to_string(cp), "--micro-batch-sequences", size, "--steps",
                   "2", "--policies", "sab+order+chunk+optimal", "--json", rows});
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
    if (layout["dp"] != dp || layout["pp"] != pp || layout["tp"] != tp) continue;
    if (layout["policy"] != "sab+order+chunk+optimal" || layout["micro_batch_sequences"] != std::stoi(size)) continue;
    found = true;
    EXPECT_EQ(layout["makespan_ms"], policy["makespan_ms"]);
    EXPECT_EQ(layout["speedup"], policy["speedup"]);
  }
  EXPECT_TRUE(found);
}

// Tokens and time of a step are means over the same steps.
TEST_F(SimulateCommand, ASweepCountsTheTokensOfAllSteps) {
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

TEST_F(SimulateCommand, SimulateRefusesOptionsThatWouldHaveNoEffect) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--gpus", "64"}, "--gpus: only applies to --sweep; add --sweep"},
      {{"--max-tp", "2"}, "--max-tp: only applies to --sweep; add --sweep"},
      {{"--tp", "4"}, "--tp 4: qwen2.5-3b has 2 key/value heads"},
      {{"--sweep", "--gpus", "64", "--dp", "8"}, "--gpus and --dp both set the number of workers"},
      {{"--ring", "--cp", "2", "--policies", "sab"}, "--policies: has no effect with --ring"},
      {{"--sweep", "--svg", "a.svg"}, "--svg: has no effect with --sweep"},
      {{"--ring", "--cp", "8", "--trace", "a.json"}, "--trace: has no effect with --ring"},
      {{"--placement", "striped"}, "--placement: only applies to a ring of --cp ranks; set --cp"},
  };
  for (const auto& [arguments, message] : cases) {
    std::vector<std::string> all = {"simulate"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProgramResult refused = run_program(all);
    EXPECT_EQ(refused.exit_code, 2) << message;
    EXPECT_NE(refused.err.find(message), std::string::npos) << refused.err;
  }
}

TEST_F(SimulateCommand, SimulateTakesDenseLayers) {
  const std::string json = (directory_ / "rows.json").string();
  const auto step_ms = [&](const std::string& layers) {
    std::vector<std::string> arguments = {"simulate",   "--model",  "qwen2.5-0.5b", "--steps", "2",
                                          "--policies", "in_order", "--json",       json};
    if (!layers.empty()) arguments.insert(arguments.end(), {"--dense-layers", layers});
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::ifstream file(json);
    return nlohmann::json::parse(file)["rows"][0]["makespan_ms"].get<double>();
  };
  const double none = step_ms(""), one = step_ms("3"), two = step_ms("3,0,3");
  EXPECT_GT(one, none);
  EXPECT_NEAR(two - none, 2 * (one - none), 1e-6 * two);  // one stage: all layers alike
  std::ifstream file(json);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("\"dense_layers\": ["), std::string::npos) << text;
  const ProgramResult refused = run_program({"simulate", "--model", "qwen2.5-0.5b", "--dense-layers", "24"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--dense-layers: there is no layer 24; the model has layers 0 to 23"), std::string::npos)
      << refused.err;
}

}  // namespace
}  // namespace sb::test
