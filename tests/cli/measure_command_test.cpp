// Commands that measure or show, from end to end.
#include <nlohmann/json.hpp>

#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

class MeasureCommand : public Cli {
 protected:
  nlohmann::json json_of(const std::string& path) const {
    std::ifstream file(path);
    return nlohmann::json::parse(file);
  }
  static ProgramResult run(std::vector<std::string> arguments, const std::vector<std::string>& more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }
};

TEST_F(MeasureCommand, BenchAttentionMeasuresDenseAndSparse) {
  const std::string json = (directory_ / "bench.json").string();
  const ProgramResult result =
      run_program({"bench",      "attention", "--seq",       "4096",   "--density", "0.25", "--heads",        "2",
                   "--kv-heads", "1",         "--head-dim",  "32",     "--block",   "64",   "--query-block",  "8",
                   "--pattern",  "topk",      "--selection", "causal", "--score",   "mean", "--score-tokens", "16",
                   "--threads",  "1",         "--repeats",   "1",      "--json",    json});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json rows = json_of(json)["rows"];
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["tokens"], 4096);
  EXPECT_NEAR(rows[0]["density"].get<double>(), 0.25, 0.1);
  EXPECT_GT(rows[0]["sparse_backward_ms"].get<double>(), 0);
}

TEST_F(MeasureCommand, AProfileIsMeasuredAndSimulated) {
  const std::string profile = (directory_ / "profile.json").string(), samples = (directory_ / "samples.csv").string(),
                    rows = (directory_ / "rows.json").string();
  const std::string model = write("config.json", R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
      "num_hidden_layers": 3, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 32,
      "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
      "tie_word_embeddings": true})");
  const ProgramResult measured =
      run_program({"profile", "--model",  model, "--out",     profile, "--samples",     samples, "--max-tokens",
                   "1024",    "--budget", "384", "--block",   "64",    "--query-block", "8",     "--recompute",
                   "none",    "--layers", "3",   "--threads", "1",     "--held-out",    "2",     "--repeats",
                   "1"});
  ASSERT_EQ(measured.exit_code, 0) << measured.err;
  EXPECT_EQ(json_of(profile)["recompute"], "none");
  const auto attention = json_of(profile)["attention"];
  EXPECT_EQ(attention["pattern"], "mass");
  EXPECT_EQ(attention["score"], "planes");
  EXPECT_EQ(attention["score_channels"], 32);
  EXPECT_GT(json_of(profile)["operations"]["selection"]["us"].back(), 0);
  EXPECT_TRUE(std::filesystem::file_size(samples) > 0);
  const ProgramResult simulated = run_program({"simulate",
                                               "--model",
                                               model,
                                               "--profile",
                                               profile,
                                               "--coverage",
                                               "layered",
                                               "--lengths",
                                               write("lengths.txt", "64\n500\n300\n"),
                                               "--dp",
                                               "2",
                                               "--global-batch",
                                               "4",
                                               "--steps",
                                               "2",
                                               "--budget",
                                               "384",
                                               "--block",
                                               "64",
                                               "--query-block",
                                               "8",
                                               "--policies",
                                               "in_order",
                                               "--json",
                                               rows});
  ASSERT_EQ(simulated.exit_code, 0) << simulated.err;
  EXPECT_EQ(json_of(rows)["rows"].size(), 1u);
}

TEST_F(MeasureCommand, SimulateShowsDenseAttentionAndTheInterconnect) {
  const std::string json = (directory_ / "rows.json").string();
  const std::vector<std::string> simulate = {"simulate", "--model",    "qwen2.5-3b", "--profile", "h200-analytic",
                                             "--dp",     "2",          "--steps",    "2",         "--seed",
                                             "7",        "--policies", "in_order",   "--json",    json};
  const ProgramResult with = run_program(simulate);
  ASSERT_EQ(with.exit_code, 0) << with.err;
  EXPECT_NE(with.out.find("links: assumed from public measurements; inside a node of 8: "), std::string::npos)
      << with.out;
  EXPECT_NE(with.out.find("\ndense attention, in_order "), std::string::npos) << with.out;
  nlohmann::json object = json_of(json);
  const double dense = object["dense"]["makespan_ms"], sparse = object["rows"][0]["makespan_ms"];
  EXPECT_GT(dense, sparse);
  EXPECT_NEAR(object["dense"]["speedup"].get<double>(), sparse / dense, 1e-9);
  EXPECT_NEAR(object["dense"]["mean_coverage"].get<double>(), 1.0, 1e-9);
  const ProgramResult without = run(simulate, {"--comm", "off", "--head", "off", "--warmup-depth", "2"});
  ASSERT_EQ(without.exit_code, 0) << without.err;
  EXPECT_NE(without.out.find("transfers are not counted"), std::string::npos) << without.out;
  EXPECT_LT(json_of(json)["rows"][0]["makespan_ms"].get<double>(), sparse);
}

TEST_F(MeasureCommand, SimulateTakesWhatLimitsAPlan) {
  const std::string json = (directory_ / "rows.json").string();
  const std::vector<std::string> simulate = {
      "simulate",       "--model", "qwen2.5-0.5b",         "--dp",   "2",      "--steps", "2",
      "--global-batch", "4",       "--micro-batch-tokens", "262144", "--json", json};
  const auto rows = [&](const std::vector<std::string>& more) {
    const ProgramResult result = run(simulate, more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json_of(json);
  };
  const nlohmann::json loose = rows({"--policies", "sab+order+optimal", "--p", "0.3", "--frontier"}),
                       tight = rows({"--policies", "sab+order+optimal", "--p", "0", "--max-budget", "8192"});
  EXPECT_LE(tight["rows"][0]["worst_loss"].get<double>(), 1e-9) << "nothing may lose coverage";
  EXPECT_GT(loose["rows"][0]["worst_loss"].get<double>(), tight["rows"][0]["worst_loss"].get<double>());
  EXPECT_TRUE(loose.contains("frontier"));
  EXPECT_FALSE(rows({"--no-frontier"}).contains("frontier"));
  const ProgramResult ring = run_program(
      {"simulate", "--ring", "--cp", "2", "--ring-tokens", "16384", "--slash-density", "0.1", "--verticals", "4"});
  EXPECT_EQ(ring.exit_code, 0) << ring.err;
}

TEST_F(MeasureCommand, AReportOfARunIsOnePage) {
  const std::string folder = (directory_ / "run").string(), page = (directory_ / "page.html").string();
  const ProgramResult trained =
      run_program({"train", run_file(), "--set", "train.output_dir=" + folder, "--set", "train.max_steps=3", "--set",
                   "data.synthetic.min_length=16", "--set", "batch={global_batch_size: 4, micro_batch_sequences: 1}",
                   "--set", "balance={batching: sab, ordering: auto, profile: h200-analytic, compare_steps: 1}"});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  EXPECT_NE(trained.out.find("measured: the same batches run in order took "), std::string::npos) << trained.out;
  const ProgramResult result = run_program({"report", folder, "--out", page, "--step", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::ifstream file(page);
  const std::string html((std::istreambuf_iterator<char>(file)), {});
  for (const char* part : {"<html", "loss", "Schedule of a step", "step 2", "balancing"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
  const ProgramResult none = run_program({"report", folder, "--out", page, "--step", "9"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.err.find("has no plan of step 9"), std::string::npos) << none.err;
}

// Every option of the tasks, by what it changes in the sequences that are written.
TEST_F(MeasureCommand, EveryOptionOfATaskCounts) {
  const auto tokens = [&](const std::vector<std::string>& options) {
    const std::string output = (directory_ / "task").string();
    const ProgramResult made = run({"data", "synth", "--output", output, "--overwrite", "--length", "1024",
                                    "--sequences", "2", "--vocab-size", "512"},
                                   options);
    EXPECT_EQ(made.exit_code, 0) << made.err;
    std::ifstream file(output + ".bin", std::ios::binary);
    std::ifstream mask(output + ".mask", std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {}) +
           std::string((std::istreambuf_iterator<char>(mask)), {});
  };
  const std::vector<std::vector<std::string>> cases = {
      {"chunk_recall", "--seed", "2"},          {"chunk_recall", "--min-length", "64"},
      {"chunk_recall", "--chunk", "4"},         {"needle_single", "--min-distance", "300"},
      {"needle_multi_key", "--needles", "2"},   {"needle_multi_value", "--values", "2"},
      {"needle_multi_query", "--queries", "1"}, {"needle_single", "--value-tokens", "3"},
      {"needle_single", "--depth", "0.5"},      {"variable_tracking", "--hops", "2"},
      {"variable_tracking", "--chains", "3"},   {"common_words", "--answers", "2"},
  };
  for (const std::vector<std::string>& one : cases) {
    const std::vector<std::string> task = {"--task", one[0]};
    std::vector<std::string> with = task;
    with.insert(with.end(), one.begin() + 1, one.end());
    const std::string plain = tokens(task);
    EXPECT_TRUE(tokens(task) == plain) << one[0] << ": the same again";
    EXPECT_TRUE(tokens(with) != plain) << one[0] << " " << one[1];
  }
}

TEST_F(MeasureCommand, TokenizeTakesItsTokensFromTheCommandLine) {
  const std::string input = write("in.jsonl", "{\"prompt\": \"The sky is\", \"completion\": \" blue\"}\n");
  const std::string tokenizer = "tests/data/tokenizer_qwen2_style/tokenizer.json";
  const auto shown = [&](const std::vector<std::string>& more) {
    const std::string output = (directory_ / "out").string();
    const ProgramResult made =
        run({"data", "tokenize", "--tokenizer", tokenizer, "--input", input, "--output", output, "--overwrite"}, more);
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return run_program({"data", "show", output, "--tokenizer", tokenizer}).out;
  };
  EXPECT_NE(shown({}).find("blue<|endoftext|>"), std::string::npos) << shown({});
  EXPECT_NE(shown({"--eod-token", "<|im_end|>"}).find("blue<|im_end|>"), std::string::npos);
  EXPECT_EQ(shown({"--no-end-token"}).find("<|endoftext|>"), std::string::npos);
  EXPECT_EQ(shown({"--add-special-tokens"}), shown({})) << "this tokenizer's post-processor adds nothing";
}

TEST_F(MeasureCommand, EvalTakesItsOptions) {
  const std::string question = write("q.jsonl", "{\"input\": \"a\", \"outputs\": [\"b\", \"c\"]}\n");
  const std::string predictions = write("p.jsonl", "{\"pred\": \"b\"}\n");
  const std::vector<std::string> ruler = {"eval", "ruler", "--input", question, "--predictions", predictions};
  EXPECT_NE(run_program(ruler).out.find(": 50.00 over 1 samples"), std::string::npos);
  EXPECT_NE(run(ruler, {"--part"}).out.find(": 100.00 over 1 samples"), std::string::npos);
  const ProgramResult needle = run_program({"eval", "needle", "--model", "tests/data/hf/qwen2_tied", "--lengths", "64",
                                            "--depths", "0.25,0.75", "--samples", "1", "--batch", "2", "--seed", "3"});
  ASSERT_EQ(needle.exit_code, 0) << needle.err;
  EXPECT_NE(needle.out.find("     75% "), std::string::npos) << needle.out;
  const ProgramResult chat =
      run_program({"eval", "generate", "--model", "tests/data/hf/qwen2_tied", "--chat", "--prompt", "a"});
  EXPECT_EQ(chat.exit_code, 2) << "a model without a tokenizer has no chats";
}

}  // namespace
}  // namespace sb::test
