// The real program as several processes: started, stopped, killed and frozen.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "comm/host_name.h"
#include "core/random.h"
#include "data/files/token_writer.h"
#include "run/checkpoint/checkpoint.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/training_process.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds, std::chrono::seconds;

// Nothing that works takes so long, however busy the machine.
constexpr seconds kHang{100};

std::vector<std::string> on_ranks(int dp, int pp, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"--ranks", std::to_string(dp * pp),
                                        "--set",   "parallel.dp=" + std::to_string(dp),
                                        "--set",   "parallel.pp=" + std::to_string(pp),
                                        "--set",   "train.threads=1",
                                        "--set",   "train.max_steps=20"};
  for (std::string& option : more) arguments.insert(arguments.end(), {"--set", std::move(option)});
  return arguments;
}

pid_t parent_of(const fs::path& process) {
  std::ifstream file(process / "stat");
  std::string text;
  std::getline(file, text);
  const size_t after_name = text.rfind(')');
  if (after_name == std::string::npos) return -1;
  char state = 0;
  int parent = -1;
  std::sscanf(text.c_str() + after_name + 1, " %c %d", &state, &parent);
  return state == 'Z' ? -1 : parent;
}

std::map<pid_t, std::vector<fs::path>> processes_by_parent() {
  std::map<pid_t, std::vector<fs::path>> children;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") == std::string::npos) children[parent_of(entry.path())].push_back(entry);
  }
  return children;
}

pid_t mpirun_of(const Training& training) {
  return std::stoi(processes_by_parent()[training.process()].at(0).filename());
}

// The processes of the ranks: grandchildren of the program that was started, by the launcher's word for their number.
std::map<int, pid_t> ranks_of(const Training& training) {
  std::map<pid_t, std::vector<fs::path>> children = processes_by_parent();
  std::map<int, pid_t> ranks;
  for (const fs::path& launcher : children[training.process()]) {
    for (const fs::path& process : children[std::stoi(launcher.filename())]) {
      std::ifstream file(process / "environ", std::ios::binary);
      std::string word;
      while (std::getline(file, word, '\0'))
        if (word.starts_with("OMPI_COMM_WORLD_RANK="))
          ranks[std::stoi(word.substr(21))] = std::stoi(process.filename());
    }
  }
  return ranks;
}

bool all_started(const Training& training, size_t ranks) {
  return ranks_of(training).size() == ranks;
}

void expect_gone(const std::map<int, pid_t>& ranks) {
  for (const auto& [rank, process] : ranks) {
    const fs::path folder = "/proc/" + std::to_string(process);
    for (int tries = 0; tries < 500 && fs::exists(folder) && parent_of(folder) >= 0; ++tries)
      std::this_thread::sleep_for(milliseconds(10));
    EXPECT_FALSE(fs::exists(folder) && parent_of(folder) >= 0) << "rank " << rank << " is still there";
  }
}

TEST(RanksProcess, TrainAsOneProcessDoes) {
  ScratchDirectory alone, ranks;
  ASSERT_EQ(train(alone.path(), {"--set", "train.threads=1", "--set", "train.max_steps=20"}), 0);
  ASSERT_EQ(train(ranks.path(), on_ranks(2, 2, {"train.trace=true"})), 0);
  const auto expected = losses(alone.path()), got = losses(ranks.path());
  ASSERT_EQ(got.size(), 20u);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].first, expected[i].first);
    EXPECT_NEAR(got[i].second, expected[i].second, 1e-5 * expected[i].second);
  }
  std::set<int> processes;
  for (const auto& event : nlohmann::json::parse(read_bytes(ranks / "run" / "trace.json")))
    processes.insert(event["pid"].get<int>());
  EXPECT_EQ(processes, (std::set<int>{0, 1, 2, 3}));
  const std::string out = read_bytes(ranks / "output.txt");
  for (const char* part :
       {"4 ranks: dp 2 x pp 2 x cp 1 x tp 1, layers 0-0 | 1-1", "memory plan per rank of stage 1", "step 20/20"})
    EXPECT_TRUE(contains(out, part)) << part << "\n" << out;
  // One of them speaks.
  EXPECT_EQ(out.find("step 7/20"), out.rfind("step 7/20")) << out;
}

// mpirun gives its ranks terminals of its own: what counts is where the output goes in the end.
TEST(RanksProcess, DrawABarWhereTheirOutputGoesToATerminal) {
  for (const bool terminal : {true, false}) {
    ScratchDirectory scratch;
    write_bytes(scratch / "run.yaml", kRun);
    const std::string train =
        std::string(SB_PROGRAM) + " train " + (scratch / "run.yaml").string() +
        " --ranks 2 --set parallel.dp=2 --set train.max_steps=3 --set train.output_dir=" + (scratch / "run").string();
    const std::string out = (scratch / "output.txt").string();
    const std::string command =
        terminal ? "script -qec '" + train + "' " + out + " </dev/null >/dev/null" : train + " >" + out;
    ASSERT_EQ(std::system(command.c_str()), 0) << read_bytes(out);
    EXPECT_EQ(contains(read_bytes(out), "\r[####        ] step 1/3"), terminal) << read_bytes(out);
    EXPECT_TRUE(contains(read_bytes(out), "step 3/3")) << read_bytes(out);
  }
}

// Sequences that two and four processes share, dense and sparse; two of them in pieces.
TEST(RanksProcess, ShareSequencesAndLearnWhatOneProcessLearns) {
  for (const char* attention :
       {"{pattern: dense, block: 64}",
        "{pattern: topk, block: 64, budget: 256, dense_below: 64, local_blocks: 1, coverage_rows: 0}"}) {
    const std::vector<std::string> options = {std::string("attention=") + attention,
                                              "data.max_sequence_length=448",
                                              "train.save_steps=0",
                                              "data.synthetic.length=448",
                                              "data.synthetic.curriculum.start_length=300",
                                              "train.max_steps=6"};
    ScratchDirectory alone;
    ASSERT_EQ(train(alone.path(), on_ranks(1, 1, options)), 0);
    const auto expected = losses(alone.path());
    ASSERT_EQ(expected.size(), 6u);
    for (const int cp : {2, 4}) {
      SCOPED_TRACE(testing::Message() << attention << " cp " << cp);
      std::vector<std::string> shared = options;
      shared.insert(shared.end(), {"parallel.cp=" + std::to_string(cp), "parallel.node_size=2"});
      if (cp == 2) shared.push_back("balance.chunk=128");
      std::vector<std::string> arguments = on_ranks(1, 1, shared);
      arguments[1] = std::to_string(cp);
      ScratchDirectory ranks;
      ASSERT_EQ(train(ranks.path(), arguments), 0) << read_bytes(ranks / "output.txt");
      const auto got = losses(ranks.path());
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_NEAR(got[i].second, expected[i].second, 1e-5 * expected[i].second) << i;
    }
  }
}

// Products that two and four processes share, dense and with heads that choose for themselves.
TEST(RanksProcess, ShareProductsAndLearnWhatOneProcessLearns) {
  for (const char* attention :
       {"{pattern: dense}",
        "{pattern: topk, block: 64, budget: 256, dense_below: 64, local_blocks: 1, coverage_rows: 2}"}) {
    const std::vector<std::string> options = {std::string("attention=") + attention,
                                              "model.init.num_attention_heads=4",
                                              "model.init.num_key_value_heads=4",
                                              "data.max_sequence_length=448",
                                              "train.save_steps=0",
                                              "data.synthetic.length=448",
                                              "data.synthetic.curriculum.start_length=301",
                                              "train.max_steps=6"};
    ScratchDirectory alone;
    ASSERT_EQ(train(alone.path(), on_ranks(1, 1, options)), 0);
    const auto expected = losses(alone.path());
    ASSERT_EQ(expected.size(), 6u);
    for (const auto& [tp, pp] : {std::pair{2, 1}, {4, 1}, {2, 2}}) {
      SCOPED_TRACE(testing::Message() << attention << " tp " << tp << " pp " << pp);
      std::vector<std::string> shared = options;
      shared.push_back("parallel.tp=" + std::to_string(tp));
      std::vector<std::string> arguments = on_ranks(1, pp, shared);
      arguments[1] = std::to_string(tp * pp);
      ScratchDirectory ranks;
      ASSERT_EQ(train(ranks.path(), arguments), 0) << read_bytes(ranks / "output.txt");
      const auto got = losses(ranks.path());
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_NEAR(got[i].second, expected[i].second, 1e-5 * expected[i].second) << i;
    }
  }
}

// Two stages, each on two ranks that share its products (`tp`) or that gather the weights of each other (`dp`).
void kill_ranks(int dp, int tp, int rounds) {
  SCOPED_TRACE(testing::Message() << "dp " << dp << ", tp " << tp);
  ScratchDirectory undisturbed, killed;
  // Long enough that the first kills find it running.
  std::vector<std::string> arguments =
      on_ranks(dp, 2, {"train.max_steps=" + std::to_string(100 + 50 * rounds), "parallel.tp=" + std::to_string(tp)});
  arguments[1] = "4";
  ASSERT_EQ(train(undisturbed.path(), arguments), 0);
  Random random(static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()));
  int kills = 0;
  for (int round = 0; round < rounds; ++round) {
    Training training(killed.path(), arguments);
    ASSERT_TRUE(wait_for(training, [&] { return all_started(training, 4); })) << training.output();
    const auto moment = std::chrono::steady_clock::now() + milliseconds(random.below(700));
    if (!wait_for(training, [&] { return std::chrono::steady_clock::now() >= moment; })) break;  // it was faster
    const std::map<int, pid_t> ranks = ranks_of(training);
    const auto victim = static_cast<int>(random.below(4));
    if (!ranks.contains(victim)) break;
    kill(ranks.at(victim), SIGKILL);
    ASSERT_TRUE(training.ends_within(kHang)) << "it hangs after rank " << victim << " was killed\n"
                                             << training.output();
    if (training.wait() == 0) break;
    ++kills;
    EXPECT_TRUE(contains(training.output(), "rank " + std::to_string(victim))) << training.output();
    expect_gone(ranks);
    for (const int64_t step : checkpoint_steps(killed / "run"))
      EXPECT_EQ(find_damage(checkpoint_path(killed / "run", step)), std::nullopt) << step;
  }
  EXPECT_GT(kills, 0);
  ASSERT_EQ(train(killed.path(), arguments), 0);
  EXPECT_EQ(losses(killed.path()), losses(undisturbed.path()));
  EXPECT_EQ(final_weights(killed.path()), final_weights(undisturbed.path()));
}

// SB_KILL_ROUNDS=20 for the long form.
TEST(RanksProcess, ARankKilledAtAnyMomentEndsTheRunWhichThenGoesOnExactly) {
  const char* asked = std::getenv("SB_KILL_ROUNDS");
  const int rounds = asked ? std::atoi(asked) : 3;
  kill_ranks(/*dp=*/1, /*tp=*/2, rounds);
  kill_ranks(/*dp=*/2, /*tp=*/1, rounds);
}

// mpirun itself hangs at times when a rank dies while it connects the others; a stopped one stands for it.
TEST(RanksProcess, ADeadRankEndsTheRunThoughMpirunHangs) {
  ScratchDirectory scratch;
  Training training(scratch.path(), on_ranks(2, 1, {"train.max_steps=100000"}));
  ASSERT_TRUE(wait_for(training, [&] { return metric_lines(scratch.path()) >= 1; })) << training.output();
  const std::map<int, pid_t> ranks = ranks_of(training);
  kill(mpirun_of(training), SIGSTOP);
  kill(ranks.at(1), SIGKILL);
  ASSERT_TRUE(training.ends_within(kHang)) << training.output();
  EXPECT_NE(training.wait(), 0);
  EXPECT_TRUE(contains(training.output(), "rank 1 ended")) << training.output();
  expect_gone(ranks);
}

TEST(RanksProcess, AFrozenRankEndsTheRunByTheTimeOut) {
  ScratchDirectory scratch;
  Training training(scratch.path(), on_ranks(3, 1, {"parallel.timeout=3", "train.max_steps=100000"}));
  ASSERT_TRUE(wait_for(training, [&] { return metric_lines(scratch.path()) >= 3; })) << training.output();
  const std::map<int, pid_t> ranks = ranks_of(training);
  kill(ranks.at(1), SIGSTOP);
  ASSERT_TRUE(training.ends_within(kHang)) << training.output();
  EXPECT_NE(training.wait(), 0);
  EXPECT_TRUE(contains(training.output(), "waited 3")) << training.output();
  expect_gone(ranks);
}

TEST(RanksProcess, ASignalToTheProgramToMpirunOrToOneRankSavesAndGoesOnExactly) {
  ScratchDirectory undisturbed;
  // So many steps that a busy machine does not do them all before the signal is sent.
  const std::vector<std::string> arguments = on_ranks(2, 1, {"train.save_steps=0", "train.max_steps=300"});
  ASSERT_EQ(train(undisturbed.path(), arguments), 0);
  for (const std::string to : {"the program", "mpirun", "one rank"}) {
    SCOPED_TRACE(to);
    ScratchDirectory stopped;
    {
      Training training(stopped.path(), arguments);
      ASSERT_TRUE(wait_for(training, [&] { return metric_lines(stopped.path()) >= 3; })) << training.output();
      if (to == "one rank")
        kill(ranks_of(training).at(1), SIGTERM);
      else if (to == "mpirun")
        kill(mpirun_of(training), SIGUSR1);
      else
        training.signal(SIGTERM);
      ASSERT_TRUE(training.ends_within(kHang)) << training.output();
      EXPECT_EQ(training.wait(), 0) << training.output();
      EXPECT_TRUE(contains(training.output(), "stopped after step")) << training.output();
    }
    EXPECT_EQ(checkpoint_steps(stopped / "run").size(), 1u);
    EXPECT_EQ(train(stopped.path(), arguments), 0);
    EXPECT_EQ(final_weights(stopped.path()), final_weights(undisturbed.path()));
  }
}

// Rank 1 alone comes to read the one sequence that cannot be right.
TEST(RanksProcess, AFailingRankIsNamedAndEndsTheRun) {
  ScratchDirectory scratch;
  TokenWriter writer((scratch / "data").string(), {});
  for (int document = 0; document < 4; ++document)
    writer.add(std::vector<int32_t>{5, 6, 7, 8}, std::vector<uint8_t>{0, 1, 0, 1});
  writer.finish();
  // The third one's mask promises a target less than it has, which is seen when it is read.
  std::fstream(scratch / "data.mask", std::ios::in | std::ios::out | std::ios::binary).seekp(32 + 4 * 2).put(1);
  Training training(scratch.path(), on_ranks(2, 1,
                                             {"data={train: [" + (scratch / "data").string() +
                                                  "], shuffle: false, synthetic: null, max_sequence_length: 48}",
                                              "train.validation_steps=0"}));
  ASSERT_TRUE(training.ends_within(kHang)) << training.output();
  EXPECT_EQ(training.wait(), 2) << "as one rank would";
  EXPECT_TRUE(contains(training.output(), "rank 1 on " + host_name() + " ended the job: ")) << training.output();
  EXPECT_TRUE(contains(training.output(), "document 2 should have 1 targets but has 2")) << training.output();
  EXPECT_FALSE(contains(training.output(), "rank 0 on " + host_name() + " ended the job: ")) << training.output();
}

std::vector<nlohmann::json> events(const ScratchDirectory& scratch) {
  std::istringstream in(read_bytes(scratch / "run" / "events.jsonl"));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line));
  return all;
}

TEST(RanksProcess, ALostRankIsForgivenAndTheRunEndsAsAnUndisturbedOne) {
  ScratchDirectory undisturbed, disturbed;
  std::vector<std::string> arguments = on_ranks(2, 1, {"train.max_steps=200", "train.save_steps=7"});
  ASSERT_EQ(train(undisturbed.path(), arguments), 0);
  arguments.insert(arguments.end(), {"--max-restarts", "2"});
  Training training(disturbed.path(), arguments);
  ASSERT_TRUE(wait_for(training, [&] { return checkpoint_steps(disturbed / "run").size() > 0; })) << training.output();
  kill(ranks_of(training).at(1), SIGKILL);
  ASSERT_TRUE(training.ends_within(2 * kHang)) << training.output();
  EXPECT_EQ(training.wait(), 0) << training.output();
  EXPECT_TRUE(contains(training.output(), "starting again from checkpoint-")) << training.output();
  EXPECT_TRUE(contains(training.output(), "restart 1 of 2")) << training.output();
  EXPECT_TRUE(contains(training.output(), "in 1 restart\n")) << "the last line says what was lost";
  EXPECT_EQ(losses(disturbed.path()), losses(undisturbed.path()));
  EXPECT_EQ(final_weights(disturbed.path()), final_weights(undisturbed.path()));
  const std::vector<nlohmann::json> all = events(disturbed);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0]["event"], "lost");
  EXPECT_EQ(all[0]["rank"], 1);
  EXPECT_EQ(all[0]["host"], host_name());
  EXPECT_GE(all[0]["step"], 7);
  EXPECT_EQ(all[1]["event"], "resumed");
  EXPECT_EQ(all[1]["step"].get<int64_t>() % 7, 0);
  EXPECT_EQ(all[2]["event"], "finished");
  EXPECT_EQ(all[2]["step"], 200);
}

TEST(RanksProcess, AUsersErrorIsNotTriedAgain) {
  ScratchDirectory scratch;
  std::vector<std::string> arguments = on_ranks(2, 1, {"train.resume=" + (scratch / "nothing").string()});
  arguments.insert(arguments.end(), {"--max-restarts", "2"});
  Training training(scratch.path(), arguments);
  ASSERT_TRUE(training.ends_within(kHang)) << training.output();
  EXPECT_EQ(training.wait(), 2) << training.output();
  EXPECT_FALSE(contains(training.output(), "starting again")) << training.output();
}

// The shard of the second rank, which neither wrote by itself nor looks for by itself now.
TEST(RanksProcess, AnAlteredShardIsNamedAndTheCheckpointBeforeItResumed) {
  ScratchDirectory scratch;
  const std::vector<std::string> arguments = on_ranks(2, 1, {"train.max_steps=6", "train.save_steps=2"});
  ASSERT_EQ(train(scratch.path(), arguments), 0);
  const std::string weights = final_weights(scratch.path());
  const fs::path shard = checkpoint_path(scratch / "run", 6) / "optimizer-00002-of-00002.safetensors";
  std::string content = read_bytes(shard);
  content.back() ^= 1;
  write_bytes(shard, content);
  Training training(scratch.path(), arguments);
  ASSERT_EQ(training.wait(), 0) << training.output();
  EXPECT_TRUE(contains(training.output(),
                       "checkpoint-6, which is damaged: optimizer-00002-of-00002.safetensors has a "
                       "wrong checksum"))
      << training.output();
  EXPECT_TRUE(contains(training.output(), "checkpoint-4 after step 4")) << training.output();
  EXPECT_EQ(final_weights(scratch.path()), weights);
}

TEST(RanksProcess, StandInATableAndKeepTheirThreads) {
  ScratchDirectory scratch;
  for (const std::string cores : {"first", "later"}) {
    const bool first = cores == "first";
    Training training(scratch.path(), on_ranks(2, 1,
                                               {"train.threads=" + std::string(first ? "3" : "0"),
                                                "train.max_steps=" + std::string(first ? "2" : "4")}));
    ASSERT_EQ(training.wait(), 0) << training.output();
    EXPECT_TRUE(contains(read_bytes(scratch / "run" / "run.yaml"), "threads: 3")) << cores;
    const std::string table = read_bytes(scratch / "run" / "machine.txt");
    EXPECT_TRUE(contains(table, "0-1   " + host_name())) << table;
    EXPECT_TRUE(contains(training.output(), "0-1   " + host_name())) << training.output();
  }
}

TEST(RanksProcess, TheLogLevelIsThatOfAllRanks) {
  ScratchDirectory scratch;
  for (const std::string level : {"debug", "info"}) {
    fs::remove_all(scratch / "run");
    Training training(scratch.path(), on_ranks(2, 1, {"train.max_steps=2"}), RLIM_INFINITY, {"--log-level", level});
    ASSERT_TRUE(training.ends_within(kHang)) << training.output();
    EXPECT_EQ(training.wait(), 0) << training.output();
    EXPECT_EQ(contains(training.output(), "[rank 0 on " + host_name() + "] debug saved"), level == "debug")
        << training.output();
  }
}

TEST(RanksProcess, AWrongNumberOfRanksIsRefusedOnce) {
  ScratchDirectory scratch;
  Training training(scratch.path(), {"--ranks", "3", "--set", "parallel.dp=2"});
  EXPECT_EQ(training.wait(), 2);
  EXPECT_TRUE(
      contains(training.output(),
               "dp 2 x pp 1 x cp 1 x tp 1 need 2 ranks, but 3 were started: start the program with `--ranks 2`"))
      << training.output();
  EXPECT_FALSE(fs::exists(scratch / "run"));
}

}  // namespace
}  // namespace sb
