#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

class EvalCommand : public Cli {};

// Of copy only the second half counts, here the positions from 1,024 on.
TEST_F(EvalCommand, PerplexityOfPositionsWithoutTargetsIsNone) {
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

// How often the likeliest token is the right one, against the answers of `serve` about one token at a time.
TEST_F(EvalCommand, PerplexityCountsLikeliestTokens) {
  const std::string data = (directory_ / "copy").string(), json = (directory_ / "ppl.json").string();
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--length", "48", "--sequences", "1", "--vocab-size", "2",
                         "--output", data})
                .exit_code,
            0);
  ASSERT_EQ(
      run_program({"eval", "ppl", "--model", "tests/data/hf/qwen2_tied", "--data", data, "--json", json}).exit_code, 0);
  std::ifstream file(data + ".bin", std::ios::binary);
  std::vector<uint16_t> tokens(48);
  ASSERT_TRUE(file.read(reinterpret_cast<char*>(tokens.data()), 2 * 48));
  std::string requests;
  for (size_t end = 26; end <= 48; ++end)  // targets are the second half but for its first token
    requests += nlohmann::json{{"score",
                                {{"tokens", std::vector(tokens.begin(), tokens.begin() + static_cast<int64_t>(end))},
                                 {"targets", 1}}}}
                    .dump() +
                "\n";
  const ProgramResult served =
      run_program_with_input({"eval", "serve", "--model", "tests/data/hf/qwen2_tied", "--max-tokens", "64"}, requests);
  ASSERT_EQ(served.exit_code, 0) << served.err;
  std::istringstream lines(served.out);
  std::string line;
  std::getline(lines, line);
  int right = 0;
  while (std::getline(lines, line)) right += nlohmann::json::parse(line).at("greedy").get<bool>() ? 1 : 0;
  EXPECT_GT(right, 0);
  EXPECT_LT(right, 23);
  std::ifstream result(json);
  EXPECT_DOUBLE_EQ(nlohmann::json::parse(result)["accuracy"].get<double>(), right / 23.0);
}

// 700 tokens are five key blocks of 128 and 60 tokens more; with the smallest budget a query reads its own block and
// the one before it.
TEST_F(EvalCommand, PerplexitySaysWhatAttentionRead) {
  const std::string data = (directory_ / "copy").string(), json = (directory_ / "ppl.json").string();
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--length", "700", "--sequences", "2", "--vocab-size", "64",
                         "--output", data})
                .exit_code,
            0);
  const auto read_with = [&](const std::string& rows, const std::string& attention) {
    const std::string run = write("window.yaml",
                                  "model: {init: {vocab_size: 64}}\ndata: {synthetic: {vocab_size: 64}}\nattention: "
                                  "{pattern: window, budget: 1, sink_blocks: 0, local_blocks: 0, dense_below: 0, "
                                  "coverage_rows: " +
                                      rows + "}\n");
    std::vector<std::string> arguments = {"eval",   "ppl", "--model", "tests/data/hf/qwen2_tied",
                                          "--data", data,  "--json",  json};
    if (attention == "as-trained") arguments.insert(arguments.end(), {"--attention", attention, "--run-config", run});
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::ifstream file(json);
    nlohmann::json found = nlohmann::json::parse(file);
    found["out"] = result.out;
    return found;
  };
  const nlohmann::json dense = read_with("4", "dense");
  EXPECT_EQ(dense["density"], 1.0);
  EXPECT_EQ(dense["coverage"], 1.0);
  EXPECT_EQ(dense["out"].get<std::string>().find("causal pairs"), std::string::npos);
  const double pairs = 5 * 128 * 129 / 2 + 60 * 61 / 2 + 4 * 128 * 128 + 60 * 128;
  const nlohmann::json measured = read_with("4", "as-trained"), unmeasured = read_with("0", "as-trained");
  EXPECT_NEAR(measured["density"].get<double>(), pairs / (700 * 701 / 2), 1e-9);
  EXPECT_GT(measured["coverage"], 0.1);
  EXPECT_LT(measured["coverage"], 1.0);
  EXPECT_NE(measured["out"].get<std::string>().find("attention: 47.41% of the causal pairs, "), std::string::npos);
  EXPECT_EQ(unmeasured["density"], measured["density"]);
  EXPECT_TRUE(unmeasured["coverage"].is_null());
}

TEST_F(EvalCommand, EvalWritesResultsOfAModelWhoseNameIsNoText) {
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

TEST_F(EvalCommand, EvalOfARunsFolderNamesTheModelInIt) {
  std::filesystem::create_directories(directory_ / "final");
  write("final/config.json", "{}");
  const ProgramResult result = run_program({"eval", "needle", "--model", directory_.string()});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find((directory_ / "final").string()), std::string::npos) << result.err;
}

TEST_F(EvalCommand, EvalRefusesOptionsThatDoNotFitTheModel) {
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
  EXPECT_EQ(error_with({"--vocab", "65"}), "error: --vocab 65: the model's vocabulary has only 64 ids\n");
  EXPECT_NE(error_with({"--vocab", "-1"}).find("--vocab: -1 is below 0"), std::string::npos);
  EXPECT_NE(error_with({"--run-config", run + "/run.yaml"}).find("only applies to --attention as-trained"),
            std::string::npos);
  EXPECT_EQ(error_with({"--attention", "as-trained", "--run-config", run + "/run.yaml"}), "");
  const ProgramResult words = run_program({"eval", "generate", "--model", model, "--token-ids", "--prompt", "1 two"});
  EXPECT_EQ(words.exit_code, 2);
  EXPECT_NE(words.err.find("--prompt \"1 two\": with --token-ids a prompt is a list of numbers"), std::string::npos)
      << words.err;
  const ProgramResult large =
      run_program({"eval", "generate", "--model", model, "--token-ids", "--prompt", "1 2 99999999999"});
  EXPECT_EQ(large.exit_code, 2);
  EXPECT_NE(large.err.find("99999999999 is not a token id"), std::string::npos) << large.err;
  const ProgramResult sampled =
      run_program({"eval", "generate", "--model", model, "--token-ids", "--prompt", "1 2", "--temperature", "nan"});
  EXPECT_EQ(sampled.exit_code, 2);
  EXPECT_NE(sampled.err.find("--temperature nan --top-p 1: both must be numbers"), std::string::npos) << sampled.err;
}

// Before a model is loaded, which these folders do not even hold, and before a GPU is looked for.
TEST_F(EvalCommand, HeadsWithoutAKernelOnGpusAreRefusedAtOnce) {
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
  const std::string measured_in_bf16 = "; GPU profiles are measured in bf16: name another model, or use --device cpu";
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

TEST_F(EvalCommand, EvalSaysWhatIsMissing) {
  const std::string questions = write("q.jsonl", "{\"input\": \"a\", \"outputs\": [\"b\"]}\n");
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--input", questions}, "pass a --model to run, or --predictions to score"},
      {{"--input", questions, "--predictions", write("two.jsonl", "{\"pred\": \"b\"}\n{\"pred\": \"b\"}\n")},
       "two.jsonl: 2 predictions for 1 questions"},
      {{"--input", write("empty.jsonl", " \n\n")}, "empty.jsonl: is empty"},
      {{"--input", write("list.jsonl", "[1]\n")}, "list.jsonl:1: not a JSON object"},
      {{"--input", write("cut.jsonl", "{\"input\": \n")}, "cut.jsonl:1: not a JSON object"},
      {{"--input", (directory_ / "none.jsonl").string()}, "none.jsonl: cannot be opened"},
  };
  for (const auto& [options, message] : cases) {
    std::vector<std::string> arguments = {"eval", "ruler"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

TEST_F(EvalCommand, EvalNamesTheLineOfAFile) {
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

TEST_F(EvalCommand, LongBenchNamesTheTaskThatItsFilesLack) {
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

TEST_F(EvalCommand, AModelsConfigOfWrongTypesIsTheUsersError) {
  const std::string config =
      write("config.json",
            "{\"num_hidden_layers\": 2, \"hidden_size\": 64, \"num_attention_heads\": 2, \"intermediate_size\": 128, "
            "\"vocab_size\": 100, \"tie_word_embeddings\": \"yes\"}");
  const ProgramResult result = run_program({"simulate", "--model", config});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("tie_word_embeddings"), std::string::npos) << result.err;
}

std::string array_of(const std::vector<std::string>& objects) {
  std::string text(1, '[');
  for (const std::string& object : objects) text.append(text.size() > 1 ? ", " : "").append(object);
  return text.append("]");
}

std::string longbench2_question(const std::string& difficulty, const std::string& length, const std::string& answer) {
  return R"({"_id": "q", "domain": "d", "sub_domain": "s", "difficulty": ")" + difficulty + R"(", "length": ")" +
         length + R"(", "question": "which?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", )" +
         R"("answer": ")" + answer + R"(", "context": "text"})";
}

TEST_F(EvalCommand, LongBench2IsScoredByDifficultyAndLength) {
  const std::string questions =
      array_of({longbench2_question("easy", "short", "A"), longbench2_question("hard", "short", "B"),
                longbench2_question("hard", "long", "C")});
  const std::string input = write("data.json", questions), json = (directory_ / "scores.json").string();
  const std::string predictions = write("pred.jsonl",
                                        "{\"pred\": \"The correct answer is (A)\"}\n{\"pred\": \"The correct answer is "
                                        "B\"}\n{\"pred\": \"C\"}\n");
  const ProgramResult result =
      run_program({"eval", "longbench2", "--input", input, "--predictions", predictions, "--json", json});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out,
            "easy     100.00 over 1 samples\nhard     50.00 ± 50.00 over 2 samples\n"
            "short    100.00 ± 0.00 over 2 samples\nlong     0.00 over 1 samples\n" +
                input + ": 66.67 ± 33.33 over 3 samples, 1 of which name no choice\n");
  std::ifstream file(json);
  const nlohmann::json scores = nlohmann::json::parse(file);
  EXPECT_EQ(scores["parts"]["hard"]["score"], 50.0);
  EXPECT_TRUE(scores["parts"]["easy"]["standard_error"].is_null());
  EXPECT_EQ(scores["rows"][1]["choice"], "B");
  EXPECT_TRUE(scores["rows"][2]["choice"].is_null());
}

// A model with a tokenizer of bytes answers: by the likeliest letter or by what it writes, as long as it may.
TEST_F(EvalCommand, ModelsAnswerAsTheOptionsSay) {
  const std::filesystem::path model = directory_ / "model";
  std::filesystem::copy("tests/data/hf/qwen2_tied", model);
  std::filesystem::copy_file("examples/small/tokenizer.json", model / "tokenizer.json");
  const std::string json = (directory_ / "scores.json").string();
  const auto rows = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--model", model.string(), "--json", json});
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::ifstream file(json);
    return nlohmann::json::parse(file)["rows"];
  };
  const std::string questions = write("data.json", array_of({longbench2_question("easy", "short", "A")}));
  const std::vector<std::string> bench = {"eval", "longbench2", "--input", questions, "--max-new-tokens", "3"};
  const auto with = [&](const std::string& how) {
    std::vector<std::string> arguments = bench;
    arguments.insert(arguments.end(), {"--choose", how});
    return rows(arguments)[0];
  };
  const nlohmann::json likely = with("likelihood"), written = with("generation");
  ASSERT_EQ(likely["loglikelihoods"].size(), 4u);
  const std::vector<double> of_letters = likely["loglikelihoods"];
  EXPECT_EQ(likely["choice"],
            std::string(1, "ABCD"[std::max_element(of_letters.begin(), of_letters.end()) - of_letters.begin()]));
  EXPECT_FALSE(written.contains("loglikelihoods"));
  EXPECT_TRUE(written["pred"].is_string());

  const std::string input =
      write("q.jsonl", "{\"context\": \"c\", \"input\": \"i\", \"answers\": [\"yes\"], \"dataset\": \"qasper\"}\n");
  const auto answer = [&](int tokens) {
    const std::string lengths = write("lengths.json", "{\"qasper\": " + std::to_string(tokens) + "}");
    return rows({"eval", "longbench", "--input", input, "--answer-lengths", lengths})[0]["pred"].get<std::string>();
  };
  const std::string brief = answer(2), full = answer(40);
  EXPECT_LT(brief.size(), full.size());
  write("lengths.json", "{\"lcc\": 3}");
  const ProgramResult lacking = run_program({"eval", "longbench", "--input", input, "--answer-lengths",
                                             (directory_ / "lengths.json").string(), "--model", model.string()});
  EXPECT_EQ(lacking.exit_code, 2);
  EXPECT_NE(lacking.err.find("no length for the task \"qasper\""), std::string::npos) << lacking.err;
}

TEST_F(EvalCommand, LongBench2RefusesWhatItDoesNotKnow) {
  const auto says = [&](const std::string& content, const std::string& what, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"eval", "longbench2", "--input", write("data.json", content)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find(what), std::string::npos) << result.err;
  };
  const std::string good = longbench2_question("easy", "short", "A");
  says(array_of({good, longbench2_question("easy", "short", "E")}),
       "data.json: question 1: \"answer\" is \"E\", which does not exist in LongBench v2");
  says(array_of({longbench2_question("hard", "tiny", "A")}), "question 0: \"length\" is \"tiny\"");
  says("[{\"_id\": 3}]", "question 0: key \"_id\" is missing or has the wrong type");
  says("[1]", "question 0: not a JSON object");
  says("[", "data.json: not a JSON array");
  says("[]", "is empty");
  says(good, "pass a --model to run");
  says(good, "prompt.txt: a prompt template must contain $C_D$",
       {"--prompt", write("prompt.txt", "$DOC$ $Q$ $C_A$ $C_B$ $C_C$")});
}

TEST_F(EvalCommand, InfiniteBenchScoresAFileByItsName) {
  const std::string input =
      write("passkey.jsonl",
            "{\"id\": 0, \"context\": \"c\", \"input\": \"i\", \"answer\": [\"12\"], \"options\": "
            "[]}\n{\"id\": 1, \"context\": \"c\", \"input\": \"i\", \"answer\": 34}\n{\"id\": 2, "
            "\"context\": \"c\", \"input\": \"i\", \"answer\": \"5\"}\n");
  const std::string predictions = write("pred.jsonl", "{\"pred\": \"12\"}\n{\"pred\": \"x 34\"}\n");
  const ProgramResult result =
      run_program({"eval", "infinitebench", "--input", input, "--predictions", predictions, "--limit", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, input + ": 100.00 ± 0.00 over 2 samples (passkey)\n");
  write("pred.jsonl", "{\"pred\": \"12\"}\n{\"pred\": \"x 34\"}\n{\"pred\": \"6\"}\n");
  const ProgramResult first =
      run_program({"eval", "infinitebench", "--input", input, "--predictions", predictions, "--limit", "2"});
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(first.out, result.out) << "of a whole file of predictions the first two count, too";
  const auto says = [&](const std::string& name, const std::string& content, const std::string& what) {
    const ProgramResult refused = run_program({"eval", "infinitebench", "--input", write(name, content)});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_NE(refused.err.find(what), std::string::npos) << refused.err;
  };
  says("mine.jsonl", "{}\n", "no metric for the task \"mine\"; name one of these with --task: code_debug");
  says("math_find.jsonl", "{\"context\": \"c\", \"answer\": []}\n",
       "math_find.jsonl:1: key \"answer\" is an empty list");
  says("math_find.jsonl", "{\"context\": \"c\", \"answer\": null}\n",
       "key \"answer\" is missing or has the wrong type");
  says("code_debug.jsonl", "{\"context\": \"c\", \"answer\": \"x\", \"options\": [\"a\"]}\n",
       "1 options, but a question");
  says("code_debug.jsonl", "{\"context\": \"c\", \"answer\": \"x\", \"options\": [\"a\", \"b\", \"c\", \"d\"]}\n",
       "code_debug.jsonl:1: the answer \"x\" is not one of the options");
  says("math_calc.jsonl", "{\"context\": \"c\", \"input\": \"i\", \"answer\": [1]}\n",
       "answers of math_calc may take 30000 tokens");
}

// The model has 320 tokens.
TEST_F(EvalCommand, ServeRefusesNumbersThatItWouldHaveToCut) {
  const std::pair<std::string, std::string> cases[] = {
      {R"({"score": {"tokens": [1, 4294967297], "targets": 1}})", "a token is 4294967297, but"},
      {R"({"score": {"tokens": [1, 3.7], "targets": 1}})", "a token is 3.7, but must be an integer from 0 to 319"},
      {R"({"score": {"tokens": [1, true], "targets": 1}})", "a token is true, but"},
      {R"({"score": {"tokens": [1, -1], "targets": 1}})", "a token is -1, but"},
      {R"({"score": {"tokens": [1, 320], "targets": 1}})", "a token is 320, but"},
      {R"({"score": {"tokens": 1, "targets": 1}})", "key \"tokens\" must be a list"},
      {R"({"score": {"tokens": [1, 2], "targets": 1.5}})", "targets is 1.5, but must be an integer from 1 to 1"},
      {R"({"score": {"tokens": [1, 2], "targets": 2}})", "targets is 2, but"},
      {R"({"score": {"tokens": [1, 2]}})", "key \"targets\" is missing"},
      {R"({"score": {"tokens": [], "targets": 1}})", "0 tokens; the first cannot be a target"},
      {R"({"generate": {"prompts": [[4294967297]], "max_new_tokens": 1}})", "a token is 4294967297, but"},
      {R"({"generate": {"prompts": [1], "max_new_tokens": 1}})", "a prompt must be a list of tokens"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 9223372036854775807}})",
       "max_new_tokens is 9223372036854775807, but must be an integer from 1 to 64"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 18446744073709551615}})", "max_new_tokens is 1844674407"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 65}})", "max_new_tokens is 65, but"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 0}})", "max_new_tokens is 0, but"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 64}})", "prompt 0 has 1 tokens; with 64 new ones"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 1, "seed": -1}})", "seed is -1, but"},
      {R"({"generate": {"prompts": [[1]], "max_new_tokens": 1, "top_p": true}})", "key \"top_p\" must be a number"},
  };
  std::string requests;
  for (const auto& [request, error] : cases) requests += request + "\n";
  requests += R"({"score": {"tokens": [1, 319], "targets": 1}})"
              "\n"
              R"({"generate": {"prompts": [[1]], "max_new_tokens": 1, "seed": 18446744073709551615}})"
              "\n";
  const ProgramResult result =
      run_program_with_input({"eval", "serve", "--model", "tests/data/hf/qwen2_tied", "--max-tokens", "64"}, requests);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream lines(result.out);
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(nlohmann::json::parse(line)["vocab_size"], 320);
  for (const auto& [request, error] : cases) {
    ASSERT_TRUE(std::getline(lines, line)) << request;
    EXPECT_NE(nlohmann::json::parse(line).value("error", "").find(error), std::string::npos) << request << line;
  }
  std::getline(lines, line);
  EXPECT_LT(nlohmann::json::parse(line).value("loglikelihood", 1.0), 0.0) << line;
  std::getline(lines, line);
  EXPECT_EQ(nlohmann::json::parse(line)["tokens"][0].size(), 1u) << line;
}

}  // namespace
}  // namespace sb::test
