// What commands write and where: files, links, pipes and tables; and what they refuse, with the cure.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "run/config/run_config.h"
#include "tests/cli/cli_fixture.h"

namespace sb::test {
namespace {

class Outputs : public Cli {
 protected:
  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  static std::string read(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::string pool(const std::string& lengths = "3000\n20000\n9000\n500\n") const { return write("pool.txt", lengths); }
  // A short case with two policies.
  std::vector<std::string> simulate(const std::vector<std::string>& more) const {
    std::vector<std::string> command = {
        "simulate", "--model", "qwen2.5-0.5b",   "--lengths", pool(),       "--steps",           "2",
        "--dp",     "2",       "--global-batch", "4",         "--policies", "in_order,sab+order"};
    command.insert(command.end(), more.begin(), more.end());
    return command;
  }
  void expect_refusals(const std::string& command,
                       const std::vector<std::pair<std::vector<std::string>, std::string>>& cases) const {
    std::vector<std::string> words;
    std::istringstream split(command);
    for (std::string word; split >> word;) words.push_back(word);
    for (const auto& [arguments, message] : cases) {
      std::vector<std::string> all = words;
      all.insert(all.end(), arguments.begin(), arguments.end());
      const ProgramResult refused = run_program(all);
      EXPECT_EQ(refused.exit_code, 2) << message;
      EXPECT_EQ(refused.out, "") << message;
      EXPECT_EQ(refused.err.rfind("error: ", 0), 0u) << refused.err;
      EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
      EXPECT_NE(refused.err.find(message), std::string::npos) << refused.err;
    }
  }
};

// A link stays one, and what it points to is replaced; where it points to nothing yet, that is made.
TEST_F(Outputs, GoThroughLinks) {
  const std::string run = path("run");
  ASSERT_EQ(
      run_program({"train", run_file(), "--set", "train.max_steps=1", "--set", "train.output_dir=" + run}).exit_code,
      0);
  const std::vector<std::vector<std::string>> commands = {
      {"data", "lengths", "--pool", pool(), "--output"},
      {"data", "synth", "--text", "--task", "vt", "--sequences", "1", "--length", "600", "--overwrite", "--output"},
      {"report", run, "--out"},
      simulate({"--json"}),
      simulate({"--svg"}),
      simulate({"--trace"}),
  };
  for (const bool exists : {true, false})
    for (size_t i = 0; i < commands.size(); ++i) {
      const std::string target = path("target" + std::to_string(i)), link = path("link" + std::to_string(i));
      std::filesystem::remove(target);
      std::filesystem::remove(link);
      if (exists) std::ofstream(target) << "what was here";
      std::filesystem::create_symlink(target, link);
      std::vector<std::string> command = commands[i];
      command.push_back(link);
      const ProgramResult result = run_program(command);
      ASSERT_EQ(result.exit_code, 0) << result.err;
      EXPECT_TRUE(std::filesystem::is_symlink(link)) << command[0] << " " << command[1];
      EXPECT_GT(read(target).size(), 10u) << command[0];
      EXPECT_EQ(read(target).find("what was here"), std::string::npos) << command[0];
    }
}

// A pipe stays a pipe, and who reads it gets the same as a file.
TEST_F(Outputs, GoThroughPipes) {
  const std::string pipe = path("pipe"), file = path("file");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDWR | O_NONBLOCK);  // both ends: nobody waits for the other
  ASSERT_GE(reader, 0);
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"data", "lengths", "--pool", pool(), "--output"}, simulate({"--trace"})}) {
    const auto run_into = [&](const std::string& to) {
      std::vector<std::string> all = command;
      all.push_back(to);
      return run_program(all).exit_code;
    };
    ASSERT_EQ(run_into(file), 0);
    ASSERT_EQ(run_into(pipe), 0);
    std::string got(1 << 16, '\0');
    const ssize_t bytes = ::read(reader, got.data(), got.size());
    ASSERT_GT(bytes, 0);
    got.resize(static_cast<size_t>(bytes));
    EXPECT_EQ(got, read(file));
    EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  }
  close(reader);
}

TEST_F(Outputs, ThatCannotBeAreRefusedBeforeTheWork) {
  const std::string nowhere = path("none/out"), folder = directory_.string(), run = path("run");
  std::filesystem::create_directories(run);
  const std::string missing = nowhere + ": cannot be written: No such file or directory",
                    directory = folder + ": cannot be written: Is a directory";
  expect_refusals("", {{{"data", "lengths", "--pool", "chatqa2-like", "--output", nowhere}, missing},
                       {{"data", "lengths", "--pool", "chatqa2-like", "--output", folder}, directory},
                       {{"data", "synth", "--text", "--overwrite", "--output", nowhere}, missing},
                       {{"report", run, "--out", nowhere}, missing},
                       {{"report", run, "--out", folder}, directory},
                       {{"simulate", "--trace", folder}, directory}});
  EXPECT_FALSE(std::filesystem::exists(path("none")));
}

// Names that YAML would read as something else: two files, a comment, a map.
TEST_F(Outputs, InitQuotesNamesThatAreNoPlainWords) {
  for (const std::string name : {"a, b", "a # b", "a: b", "'a'", "\"a\\", "- a", "42", "null"}) {
    const std::string folder = path("f");
    std::filesystem::create_directories(folder);
    const std::string tokens = folder + "/" + name, model = path("model " + name), out = path("my.yaml");
    std::filesystem::copy("tests/data/hf/qwen2_tied", model, std::filesystem::copy_options::recursive);
    ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--length", "64", "--sequences", "2", "--vocab-size",
                           "64", "--output", tokens})
                  .exit_code,
              0);
    const ProgramResult written = run_program(
        {"init", "--model", model, "--data", tokens, "--data", tokens, "--out", out, "--device", "cpu", "--overwrite"});
    ASSERT_EQ(written.exit_code, 0) << written.err;
    const RunConfig config = load_run_config(out);
    EXPECT_EQ(config.model.path, model);
    ASSERT_EQ(config.data.train.size(), 2u) << name;
    for (const auto& source : config.data.train) EXPECT_EQ(source.path, tokens);
    std::filesystem::remove_all(folder);
  }
}

TEST_F(Outputs, SimulateSaysWhatWorks) {
  expect_refusals(
      "simulate --steps 1",
      {{{"--policies", "sab,fast"}, "--policies: `fast` is not one of in_order, in_order+order, "},
       {{"--chunk", "100"}, "--chunk 100 is neither `auto` nor a multiple of 128 tokens"},
       {{"--chunk", "-128"}, "--chunk -128 is neither `auto` nor a multiple of 128 tokens"},
       {{"--chunk", "128x"}, "--chunk 128x is neither `auto` nor a multiple of 128 tokens"},
       {{"--chunk", "0"}, "--chunk 0 is neither `auto` nor a multiple of 128 tokens"},
       {{"--p", "1"}, "--p 1: must be at least 0 and below 1"},
       {{"--p", "-0.1"}, "--p -0.1: must be at least 0 and below 1"},
       {{"--global-batch", "2", "--dp", "4"},
        "--global-batch 2 is smaller than --dp 4: some ranks would have nothing to do"},
       {{"--micro-batch-tokens", "1000"}, "more than the cap of 1000 per micro-batch; raise --micro-batch-tokens"},
       {{"--dense-layers", "36"}, "--dense-layers: there is no layer 36; the model has layers 0 to 35"},
       {{"--pp", "37"}, "pp 37 exceeds the 36 layers of qwen2.5-3b"},
       {{"--budget", "639"}, "budget 639 is below 1 sink + 2 local + 2 blocks of 128 tokens = 640"},
       {{"--model", "gpt-17"}, "unknown model `gpt-17`; it is neither a known name (qwen2.5-0.5b, "},
       {{"--profile", "h300"}, "unknown profile `h300`; it is neither built in (h200-analytic, "},
       {{"--coverage", "power:2"}, "power coverage needs an exponent in (0, 1], got 2"},
       {{"--lengths", "nothing"},
        "unknown length pool `nothing`; it is neither a known name (chatqa2-like, longalign-like)"},
       {{"--ring"}, "--ring: set --cp to the number of ranks that share the sequence"},
       {{"--ring", "--sweep"}, "--sweep tries layouts, --ring looks at a single ring; remove one of the two"},
       {{"--ring", "--cp", "4", "--placement", "round"},
        "--placement: unknown placement `round`; choose from zigzag, striped,"},
       {{"--ring", "--cp", "4", "--node-size", "3"}, "--node-size: 3 does not divide --cp 4"},
       {{"--ring", "--cp", "4", "--ring-times", "1,-1,1"}, "--ring-times: -1 ms is negative"},
       {{"--sweep", "--verticals", "3"},
        "--verticals: only applies to a ring of --cp ranks; set --cp instead of --sweep"}});
  // What is tried is printed before there is nothing to try.
  const ProgramResult none = run_program({"simulate", "--steps", "1", "--sweep", "--gpus", "1000000", "--global-batch",
                                          "1", "--max-cp", "1", "--max-tp", "1"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.err.find("no layout of 1000000 workers fits 36 layers and a global batch of 1"), std::string::npos)
      << none.err;
}

TEST_F(Outputs, DataCommandsSayWhatWorks) {
  const std::string tokens = path("tokens");
  ASSERT_EQ(run_program({"data", "synth", "--task", "copy", "--length", "64", "--sequences", "3", "--output", tokens})
                .exit_code,
            0);
  const std::string both =
      "data lengths: pass either --pool (chatqa2-like, longalign-like) or --input with token files";
  expect_refusals(
      "data", {{{"lengths", "--output", path("x")}, both},
               {{"lengths", "--pool", "chatqa2-like", "--input", tokens, "--output", path("x")}, both},
               {{"lengths", "--pool", pool("7\n-3\n"), "--output", path("x")}, "pool.txt:2: a length must be positive"},
               {{"stats"}, "data stats: name token files, or a pool of lengths with --lengths"},
               {{"show", tokens, "--document", "3"}, "has documents 0 to 2"},
               {{"synth", "--output", tokens}, "already exists; choose another output"},
               {{"split", tokens, "--output", path("s"), "--validation", "1"}, "validation"}});
  EXPECT_FALSE(std::filesystem::exists(path("x")));
  // A file may be merged into itself.
  EXPECT_EQ(run_program({"data", "merge", tokens, "--output", tokens, "--overwrite"}).out,
            tokens + ": 3 documents, 192 tokens\n");
  EXPECT_EQ(run_program({"data", "check", tokens}).exit_code, 0);
  expect_refusals("merge",
                  {{{directory_.string(), path("a"), directory_.string()}, "already exists; name a new directory"},
                   {{directory_.string(), path("a"), path("none/out")}, path("none") + ": no such directory"},
                   {{path("none"), path("a"), path("out")}, path("none") + ": no such directory"}});
}

// By hand: what is printed and what is in the JSON are the same numbers, one row a policy in the order asked for.
TEST_F(Outputs, TheTableOfASimulationIsItsJson) {
  const std::string json = path("rows.json");
  const ProgramResult result = run_program(simulate({"--json", json}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json written = nlohmann::json::parse(read(json));
  ASSERT_EQ(written["rows"].size(), 2u);
  EXPECT_EQ(written["rows"][0]["policy"], "in_order");
  EXPECT_EQ(written["rows"][1]["policy"], "sab+order");
  EXPECT_EQ(written["dp"], 2);
  EXPECT_EQ(written["global_batch"], 4);
  EXPECT_FALSE(written.contains("frontier"));
  EXPECT_EQ(written["rows"][0]["speedup"], 1.0);
  size_t found = 0;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) {
    for (const nlohmann::json& row : written["rows"]) {
      const std::string name = row["policy"];
      if (line.rfind(name + " ", 0) != 0) continue;
      ++found;
      std::istringstream columns(line.substr(name.size()));
      double imbalance = 0, workers = 0, step = 0;
      columns >> imbalance >> workers >> step;
      EXPECT_NEAR(imbalance, row["imbalance"].get<double>(), 0.0005001) << line;
      EXPECT_NEAR(workers, row["worker_imbalance"].get<double>(), 0.0005001) << line;
      EXPECT_NEAR(step, row["makespan_ms"].get<double>(), 0.05001) << line;
    }
  }
  EXPECT_EQ(found, 2u) << result.out;
  // The same again, whatever the number of threads; another seed may draw in another order, of the same four.
  const auto rows = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = simulate({"--json", json});
    command.insert(command.end(), more.begin(), more.end());
    EXPECT_EQ(run_program(command).exit_code, 0);
    nlohmann::json all = nlohmann::json::parse(read(json))["rows"];
    for (nlohmann::json& row : all) row.erase("planner_ms");
    return all;
  };
  EXPECT_EQ(rows({"--threads", "1"}), rows({"--threads", "2"}));
}

TEST_F(Outputs, StatisticsOfAPoolByHand) {
  const ProgramResult result =
      run_program({"data", "stats", "--json", "--lengths", pool("1\n2\n3\n# four\n1000\n94\n")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["sequences"], 5);
  EXPECT_EQ(json["tokens"], 1100);
  EXPECT_EQ(json["shortest"], 1);
  EXPECT_EQ(json["longest"], 1000);
  EXPECT_EQ(json["mean"], 220.0);
  int64_t sequences = 0, tokens = 0;
  double token_share = 0, attention_share = 0;
  for (const nlohmann::json& group : json["classes"]) {
    sequences += group["sequences"].get<int64_t>();
    tokens += group["tokens"].get<int64_t>();
    token_share += group["token_share"].get<double>();
    attention_share += group["attention_share"].get<double>();
  }
  EXPECT_EQ(sequences, 5);
  EXPECT_EQ(tokens, 1100);
  EXPECT_NEAR(token_share, 1, 1e-9);
  EXPECT_NEAR(attention_share, 1, 1e-9);
}

// Only lengths of the pool, the same by the same seed.
TEST_F(Outputs, DrawnLengthsAreOfThePool) {
  const auto drawn = [&](const char* seed) {
    const std::string out = path("drawn.txt");
    EXPECT_EQ(
        run_program({"data", "lengths", "--pool", pool(), "--count", "40", "--seed", seed, "--output", out}).exit_code,
        0);
    std::istringstream lines(read(out));
    std::vector<std::string> all;
    for (std::string line; std::getline(lines, line);)
      if (line[0] != '#') all.push_back(line);
    return all;
  };
  const std::vector<std::string> first = drawn("5");
  EXPECT_EQ(first.size(), 40u);
  for (const std::string& length : first)
    EXPECT_TRUE(length == "3000" || length == "20000" || length == "9000" || length == "500") << length;
  EXPECT_EQ(drawn("5"), first);
  EXPECT_NE(drawn("6"), first);
}

}  // namespace
}  // namespace sb::test
