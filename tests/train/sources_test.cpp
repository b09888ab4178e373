#include "train/sources.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "data/files/token_writer.h"
#include "plan/coverage/coverage.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// Documents of the given lengths, all tokens equal to `token`.
void write_documents(const fs::path& prefix, const std::vector<int>& lengths, int32_t token) {
  TokenWriter writer(prefix.string(), {});
  for (const int length : lengths) writer.add(std::vector<int32_t>(static_cast<size_t>(length), token));
  writer.finish();
}

std::string printed_by(const RunConfig& config, const fs::path& file) {
  std::FILE* out = std::fopen(file.c_str(), "w");
  run_training(config, out, false, [] { return false; });
  std::fclose(out);
  return read_bytes(file);
}

RunConfig token_run(const fs::path& directory, const std::string& data,
                    const std::vector<std::string>& overrides = {}) {
  std::vector<std::string> all = {"train.output_dir=" + (directory / "run").string()};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_run_config(R"(
model:
  init: {model_type: llama, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
batch: {global_batch_size: 3, micro_batch_sequences: 2}
train: {max_steps: 6, save_steps: 3, threads: 1, tensorboard: false}
optimizer: {learning_rate: 1.0e-2, schedule: constant}
data: )" + data,
                          "tokens.yaml", all);
}

TEST(Sources, TokenFilesAreCutAndCounted) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {10, 25, 1}, 3);
  const std::string train = "{train: [" + (scratch / "a").string() + "], max_sequence_length: 12, overlong: ";
  const Sources split = make_sources(token_run(scratch.path(), train + "split}"), 16);
  EXPECT_EQ(split.train->size(), 3u);  // 10, 12, 12; the rests of one token have no target
  EXPECT_EQ(split.train->max_length(), 12);
  EXPECT_EQ(split.validation, nullptr);
  EXPECT_EQ(split.validation_set.source, nullptr);
  const Sources drop = make_sources(token_run(scratch.path(), train + "drop}"), 16);
  EXPECT_EQ(drop.train->size(), 1u);
}

TEST(Sources, IdsOutsideTheVocabularyAreRefusedBeforeTheFirstStep) {
  ScratchDirectory scratch;
  write_documents(scratch / "good", {10, 10}, 3);
  write_documents(scratch / "bad", {10, 10}, 16);
  const std::string good = (scratch / "good").string(), bad = (scratch / "bad").string();
  for (const std::string& data : {"{train: [" + bad + "]}", "{train: [" + good + "], validation: [" + bad + "]}"}) {
    const RunConfig config = token_run(scratch.path(), data);
    const std::string error = user_error_of([&] { make_sources(config, 16); });
    EXPECT_NE(error.find(bad + ": token 0 of document 0 is 16, outside the vocabulary of 16"), std::string::npos)
        << error;
    EXPECT_NO_THROW(make_sources(config, 17));
    EXPECT_NO_THROW(make_sources(config, 16, /*leads=*/false));
  }
}

// What a run prints, and what it logs.
std::pair<std::string, std::string> train(const RunConfig& config) {
  const fs::path file = config.train.output_dir.string() + ".out";
  testing::internal::CaptureStderr();
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen(file.c_str(), "w"), std::fclose);
  try {
    run_training(config, out.get(), false, [] { return false; });
  } catch (...) {
    testing::internal::GetCapturedStderr();  // what comes later captures anew
    throw;
  }
  std::fflush(out.get());
  return {read_bytes(file), testing::internal::GetCapturedStderr()};
}

TEST(TrainingRun, EpochsSayHowManyStepsThereAre) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {10, 10, 10, 10, 10, 10, 10}, 3);
  const std::string data = "{train: [" + (scratch / "a").string() + "]}";
  const RunConfig config = token_run(scratch.path(), data, {"train.num_train_epochs=2"});
  const auto [out, err] = train(config);
  EXPECT_NE(err.find("train.num_train_epochs 2: 5 steps of 3 sequences"), std::string::npos) << err;  // 14 / 3
  EXPECT_NE(out.find("step 5/5"), std::string::npos) << out;
  const auto [again, nothing] = train(config);
  EXPECT_NE(again.find("step 5 is done and train.max_steps is 5"), std::string::npos) << again;
  EXPECT_THROW(token_run(scratch.path(), data, {"train.num_train_epochs=2", "train.max_steps=1"}), UserError);
  EXPECT_THROW(token_run(scratch.path(), "{synthetic: {vocab_size: 16}}", {"train.num_train_epochs=2"}), UserError);
  EXPECT_THROW(token_run(scratch.path(), "{train: [{path: a, weight: 2}]}", {"train.num_train_epochs=2"}), UserError);
}

TEST(TrainingRun, SaysThatLookaheadSeesTheFuture) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {500, 700}, 3);
  const std::string data = "{train: [" + (scratch / "a").string() + "], max_sequence_length: 1024}";
  for (const auto& [selection, said] : {std::pair("lookahead", true), std::pair("causal", false)}) {
    const auto [out, err] =
        train(token_run(scratch.path(), data,
                        {fmt::format("attention={{pattern: topk, selection: {}, block: 64, budget: 320}}", selection),
                         "train.max_steps=1", "batch.global_batch_size=2",
                         fmt::format("train.output_dir={}", (scratch / selection).string())}));
    const size_t at = err.find("attention.selection: lookahead lets later tokens");
    EXPECT_EQ(at != std::string::npos, said) << err;
    EXPECT_EQ(err.find("lookahead lets later tokens"), err.rfind("lookahead lets later tokens")) << "once: " << err;
  }
}

// What cures it, and where it is not.
TEST(TrainingRun, SaysWhatCuresLookahead) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {500, 700}, 3);
  const std::string files = (scratch / "a").string();
  const auto said = [&](const std::string& data, const std::string& pattern, const std::string& validation) {
    const std::string name = fmt::format("{}-{}-{}", data.size(), pattern, validation);
    return train(token_run(scratch.path(), data,
                           {fmt::format("attention={{pattern: {}, selection: lookahead, block: 64, query_block: 64, "
                                        "budget: 320}}",
                                        pattern),
                            "train.validation_attention=" + validation, "train.max_steps=1",
                            "batch.global_batch_size=2", "train.output_dir=" + (scratch / name).string()}))
        .second;
  };
  const std::string alone = fmt::format("{{train: [{}], max_sequence_length: 1024}}", files),
                    both = fmt::format("{{train: [{}], validation: [{}], max_sequence_length: 1024}}", files, files);
  const std::string with = said(both, "topk", "as_trained");
  EXPECT_NE(with.find("see, in training and in validation: losses may"), std::string::npos) << with;
  EXPECT_NE(with.find("ahead; train.validation_attention: dense validates without it, attention.selection: causal "
                      "trains without it"),
            std::string::npos)
      << with;
  for (const std::string& without : {said(both, "topk", "dense"), said(alone, "topk", "as_trained")}) {
    EXPECT_NE(without.find("see: losses may"), std::string::npos) << without;
    EXPECT_NE(without.find("ahead; attention.selection: causal trains without it"), std::string::npos) << without;
  }
  const std::string by_nature = said(both, "vertical_slash", "as_trained");
  EXPECT_EQ(by_nature.find("causal trains"), std::string::npos) << by_nature;
  EXPECT_NE(by_nature.find("dense validates without it"), std::string::npos) << by_nature;
}

TEST(TrainingRun, LayerInputsInHostMemoryChangeNothing) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {50, 70, 90}, 3);
  const std::string data = "{train: [" + (scratch / "a").string() + "]}";
  const auto weights = [&](const std::string& offload) {
    train(token_run(scratch.path(), data,
                    {"model.init.num_hidden_layers=4", "train.max_steps=2", "train.recompute=layer",
                     "train.offload=" + offload, "train.output_dir=" + (scratch / offload).string()}));
    return read_bytes(scratch / offload / "final/model.safetensors");
  };
  EXPECT_EQ(weights("2"), weights("0"));
  const std::string error = user_error_of([&] { weights("3"); });
  EXPECT_NE(error.find("train.offload: 3, but of the 4 layers of stage 0 at most 2 can keep"), std::string::npos)
      << error;
}

TEST(TrainingRun, WritesTheCoverageThatItMeasured) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {500, 700, 900, 300}, 3);
  const std::string data = "{train: [" + (scratch / "a").string() + "], max_sequence_length: 1024}";
  const std::vector<std::string> sparse = {"attention={pattern: topk, block: 64, budget: 320}", "train.max_steps=2"};
  train(token_run(scratch.path(), data, sparse));
  const CoverageTable table = parse_coverage(read_bytes(scratch / "run/coverage.json"), "coverage.json");
  EXPECT_EQ(table.layers, 1);
  EXPECT_EQ(table.length_classes.back(), 1023);  // 2^9.5 to 2^10
  // All keys are alike: k of n keys hold about k / n of the mass of a query at the end, and all of one's at the start.
  const auto model = table_coverage(table, "measured");
  EXPECT_GT(model->at({0, 900}, 0, 320), 0.25);
  EXPECT_LT(model->at({0, 900}, 0, 320), 0.9);
  EXPECT_EQ(model->at({0, 900}, 0, 900), 1.0);
}

TEST(TrainingRun, AResumedRunAddsToTheCoverageThatItMeasured) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {500, 700, 900, 300}, 3);
  const std::string data = "{train: [" + (scratch / "a").string() + "], max_sequence_length: 1024}";
  const auto run = [&](const std::string& name, int steps) {
    fs::create_directory(scratch / name);
    train(token_run(scratch / name, data,
                    {"attention={pattern: topk, block: 64, budget: 320}", fmt::format("train.max_steps={}", steps)}));
    return read_bytes(scratch / name / "run/coverage.json");
  };
  const std::string whole = run("whole", 4);
  EXPECT_NE(run("halves", 2), whole);
  EXPECT_EQ(run("halves", 4), whole);
}

TEST(Sources, OtherDocumentsUnderTheSameNameAreNoticedOnResume) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", {10, 10}, 3);
  const std::string data = "{train: [" + (scratch / "a").string() + "], max_sequence_length: 12}";
  EXPECT_EQ(train(token_run(scratch.path(), data, {"train.max_steps=2"})).second.find("training data changed"),
            std::string::npos);
  const std::string same = train(token_run(scratch.path(), data, {"train.max_steps=3"})).second;
  EXPECT_EQ(same.find("training data changed"), std::string::npos) << same;
  for (const char* end : {".bin", ".idx"}) fs::remove(scratch.path() / (std::string("a") + end));
  write_documents(scratch / "a", {10, 10, 7}, 3);
  const std::string log = train(token_run(scratch.path(), data, {"train.max_steps=4"})).second;
  EXPECT_NE(log.find("training data changed"), std::string::npos) << log;
  EXPECT_NE(log.find("1 files, 2 sequences, 20 tokens then, 1 files, 3 sequences, 27 tokens now"), std::string::npos)
      << log;
  // Said once: what is saved from here on was trained with the new documents.
  const std::string later = train(token_run(scratch.path(), data, {"train.max_steps=5"})).second;
  EXPECT_EQ(later.find("training data changed"), std::string::npos) << later;
}

TEST(TrainingRun, WhatItCannotUseIsSaidBeforeAnythingElse) {
  ScratchDirectory scratch;
  write_bytes(scratch / "file", "x");
  const std::string below_file = (scratch / "file" / "a" / "b").string();
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"train.output_dir=" + below_file, "train.output_dir " + below_file + ": cannot be created: "},
      {"train.resume=" + (scratch / "none").string(), "train.resume: "},
      {"train.resume=" + (scratch / "file").string(), "train.resume: "},
      {"balance.profile=" + (scratch / "none.json").string(), "none.json`; it is neither built in"}};
  for (const auto& [option, said] : bad) {
    SCOPED_TRACE(option);
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen((scratch / "out").c_str(), "w"), std::fclose);
    const RunConfig config = tiny_run(scratch / "run", {"train.trace=true", option});
    const std::string error = user_error_of([&] { run_training(config, out.get(), false, [] { return false; }); });
    EXPECT_NE(error.find(said), std::string::npos) << error;
    std::fflush(out.get());
    EXPECT_EQ(read_bytes(scratch / "out"), "");
    EXPECT_FALSE(fs::exists(scratch / "run"));
  }
}

TEST(TrainingRun, NamesTheTraceThatItWrote) {
  ScratchDirectory scratch;
  const auto traced = [&](int steps) {
    return train(tiny_run(scratch / "run", {"train.trace=true", fmt::format("train.max_steps={}", steps)})).first;
  };
  for (const auto& [steps, name] : {std::pair(2, "trace.json"), std::pair(3, "trace-2.json")}) {
    const std::string out = traced(steps);
    EXPECT_NE(out.find(fmt::format("trace       {}\n", (scratch / "run" / name).string())), std::string::npos) << out;
  }
}

TEST(TrainingRun, SaysWhenNothingIsLeftToTrain) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "run", {"train.max_steps=2"});
  const std::string first = train(config).first;
  EXPECT_EQ(first.find("nothing left"), std::string::npos);
  EXPECT_NE(
      first.find(fmt::format("report      sparsebalance report {}\ntime        trained ", (scratch / "run").string())),
      std::string::npos)
      << first;
  EXPECT_TRUE(first.ends_with(", nothing lost\n")) << first;
  EXPECT_EQ(first.find("trace       "), std::string::npos) << first;
  const std::string again = train(config).first;
  EXPECT_NE(again.find("nothing left to train: step 2 is done and train.max_steps is 2"), std::string::npos) << again;
}

TEST(Sources, AWeightSaysHowOftenEachSequenceIsSeen) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", std::vector<int>(10, 8), 1);
  write_documents(scratch / "b", std::vector<int>(30, 8), 2);
  const std::string data = "{train: [{path: " + (scratch / "a").string() + ", weight: 3}, " + (scratch / "b").string() +
                           "], max_sequence_length: 8}";
  const Sources sources = make_sources(token_run(scratch.path(), data), 16);
  std::map<int32_t, int> seen;
  for (uint64_t i = 0; i < 6000; ++i) ++seen[sources.train->read(i).tokens[0]];
  EXPECT_NEAR(seen[1], 3000, 100);  // 10 sequences three times each against 30 once
  EXPECT_NEAR(seen[2], 3000, 100);
}

TEST(Sources, AWeightMayBeAShareOfTheTokens) {
  ScratchDirectory scratch;
  write_documents(scratch / "a", std::vector<int>(10, 8), 1);
  write_documents(scratch / "b", std::vector<int>(30, 4), 2);
  const auto run = [&](const std::string& more, const std::vector<std::string>& set = {}) {
    return token_run(scratch.path(),
                     "{train: [{path: " + (scratch / "a").string() + ", weight: 3}, " + (scratch / "b").string() +
                         "], mixture: tokens, max_sequence_length: 8" + more + "}",
                     set);
  };
  testing::internal::CaptureStderr();
  const Sources sources = make_sources(run(""), 16);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("60.0% of the sequences drawn, 75.0% of the tokens"), std::string::npos) << log;
  std::map<int32_t, int> seen;
  for (uint64_t i = 0; i < 6000; ++i) ++seen[sources.train->read(i).tokens[0]];
  EXPECT_NEAR(seen[1], 3600, 100);  // three times the tokens in sequences of twice the length
  EXPECT_THROW(run(", shuffle: false"), UserError);
  EXPECT_THROW(run("", {"train.num_train_epochs=2"}), UserError);
}

TEST(Sources, ValidationReadsTheFilesInOrder) {
  ScratchDirectory scratch;
  write_documents(scratch / "t", {9, 9}, 1);
  write_documents(scratch / "v", {5, 6, 7}, 2);
  const std::string data = "{train: [" + (scratch / "t").string() + "], validation: [" + (scratch / "v").string() +
                           "], max_sequence_length: 16}";
  for (const auto& [wanted, expected] : {std::pair{0, 3}, {2, 2}, {64, 3}}) {
    const Sources sources =
        make_sources(token_run(scratch.path(), data, {"train.validation_sequences=" + std::to_string(wanted)}), 16);
    EXPECT_EQ(sources.validation_set.sequences, expected);
    EXPECT_EQ(sources.validation_set.recall_chunk, 0);
    for (int i = 0; i < expected; ++i) EXPECT_EQ(sources.validation->length(static_cast<uint64_t>(i)), 5 + i);
  }
}

TEST(Sources, WhatIsMissingOrForeignIsNamed) {
  ScratchDirectory scratch;
  const std::string missing = "{train: [" + (scratch / "none").string() + "], max_sequence_length: 8}";
  EXPECT_NE(user_error_of([&] { make_sources(token_run(scratch.path(), missing), 16); }).find("none"),
            std::string::npos);
  write_documents(scratch / "big", {8, 8, 8}, 200);
  const std::string big = "{train: [" + (scratch / "big").string() + "], max_sequence_length: 8}";
  std::FILE* null = std::fopen("/dev/null", "w");
  EXPECT_NE(user_error_of([&] {
              run_training(token_run(scratch.path(), big), null, false, [] { return false; });
            }).find("200"),
            std::string::npos);
  std::fclose(null);
  EXPECT_THROW(make_sources(tiny_run(scratch / "x"), 8), UserError);  // a task of 16 tokens for a model of 8
}

TEST(Sources, SyntheticValidationHasTheFullLengthAndOtherSequences) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "run", {"data.synthetic.min_length=0", "data.synthetic.length=64",
                                                      "data.synthetic.curriculum.start_length=16"});
  const Sources sources = make_sources(config, 16);
  EXPECT_EQ(sources.train->length(0), 16);
  EXPECT_EQ(sources.validation->length(0), 64);
  EXPECT_EQ(sources.validation_set.recall_chunk, 4);
  const RunConfig fixed = tiny_run(scratch / "run");
  const Sources plain = make_sources(fixed, 16);
  EXPECT_NE(plain.train->read(0).tokens, plain.validation->read(0).tokens);
}

TEST(Sources, SyntheticLengthsComeFromAFile) {
  ScratchDirectory scratch;
  std::ofstream(scratch / "lengths.txt") << "# tokens\n17\n30\n1000\n";
  const std::vector<std::string> set = {"data.synthetic.min_length=0", "data.synthetic.length=64",
                                        "data.synthetic.lengths=" + (scratch / "lengths.txt").string()};
  const Sources sources = make_sources(tiny_run(scratch / "run", set), 16);
  std::map<int64_t, int> seen;
  for (uint64_t i = 0; i < 300; ++i) ++seen[sources.train->length(i)];
  ASSERT_EQ(seen.size(), 3u);
  for (const int64_t length : {17, 30, 64}) EXPECT_NEAR(seen[length], 100, 40) << length;
  EXPECT_EQ(std::ssize(sources.train->read(0).tokens), sources.train->length(0));
  EXPECT_TRUE(seen.contains(sources.validation->length(0)));

  std::ofstream(scratch / "lengths.txt") << "17\nx\n";
  EXPECT_NE(user_error_of([&] { make_sources(tiny_run(scratch / "run", set), 16); }).find("lengths.txt:2"),
            std::string::npos);
  fs::remove(scratch / "lengths.txt");
  EXPECT_NE(user_error_of([&] { make_sources(tiny_run(scratch / "run", set), 16); }).find("lengths.txt"),
            std::string::npos);
}

TEST(Examples, AllOfThemLoad) {
  int examples = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(SB_SOURCE_DIR) / "examples")) {
    if (entry.path().extension() != ".yaml") continue;
    EXPECT_EQ(user_error_of([&] { load_run_config(entry.path()); }), "") << entry.path();
    ++examples;
  }
  EXPECT_GE(examples, 2);
}

TEST(TrainingRun, TokenFilesTrainAndResumeExactly) {
  ScratchDirectory scratch;
  TokenWriter writer((scratch / "text").string(), {});
  for (int document = 0; document < 7; ++document) {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> targets;
    for (int i = 0; i < 11 + 3 * document; ++i) {
      tokens.push_back((i * (document + 1)) % 16);
      targets.push_back(i % 5 != 0);
    }
    writer.add(tokens, targets);
  }
  writer.finish();
  const std::string data = "{train: [" + (scratch / "text").string() + "], validation: [" +
                           (scratch / "text").string() + "], max_sequence_length: 20}";
  std::FILE* null = std::fopen("/dev/null", "w");
  const auto train = [&](const std::string& name, int steps) {
    const RunConfig config = token_run(scratch / name, data, {"train.max_steps=" + std::to_string(steps)});
    return run_training(config, null, false, [] { return false; });
  };
  const TrainSummary whole = train("whole", 6);
  train("halves", 3);
  train("halves", 6);
  std::fclose(null);
  EXPECT_LT(whole.last_validation->loss, whole.first_validation->loss);
  EXPECT_EQ(whole.last_validation->recall, std::nullopt);
  EXPECT_EQ(read_bytes(scratch / "whole" / "run" / "final" / "model.safetensors"),
            read_bytes(scratch / "halves" / "run" / "final" / "model.safetensors"));
}

// What is printed first is what memory was planned for, validation included.
TEST(Sources, LimitsCountTheLongestDocumentOfValidationToo) {
  ScratchDirectory scratch;
  write_documents(scratch / "train", {12, 12, 12}, 3);
  write_documents(scratch / "validation", {40, 40}, 3);
  const RunConfig config = token_run(scratch.path(),
                                     "{train: [" + (scratch / "train").string() + "], validation: [" +
                                         (scratch / "validation").string() + "], max_sequence_length: 64}",
                                     {"train.max_steps=1"});
  const std::string out = printed_by(config, scratch / "printed");
  EXPECT_NE(out.find("up to 2 sequences and 80 tokens per micro-batch"), std::string::npos) << out;
}

}  // namespace
}  // namespace sb
