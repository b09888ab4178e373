#include "eval/longbench_prompt.h"

#include <gtest/gtest.h>

#include "core/errors.h"
#include "tests/run/scratch_directory.h"

namespace sb::longbench {
namespace {

class LongBenchPrompt : public testing::Test {
 protected:
  std::filesystem::path file(const char* text) {
    std::ofstream(directory_ / "file.json") << text;
    return directory_ / "file.json";
  }
  ScratchDirectory directory_;
};

TEST_F(LongBenchPrompt, TemplatesAreFilledWithTextAsItIs) {
  EXPECT_EQ(fill("Read:\n{context}\n\nQ: {input}\nA:", "one {input} two", "{context}?"),
            "Read:\none {input} two\n\nQ: {context}?\nA:");
  EXPECT_EQ(fill("{context}", "", "unused"), "");
  EXPECT_EQ(fill("{a} {context} {", "b", ""), "{a} b {");
}

TEST_F(LongBenchPrompt, ExamplesAndCodeAreContinuedOutsideOfAChat) {
  EXPECT_TRUE(takes_a_chat("narrativeqa"));
  EXPECT_TRUE(takes_a_chat("passage_retrieval_zh"));
  for (const char* task : {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
    EXPECT_FALSE(takes_a_chat(task)) << task;
}

TEST_F(LongBenchPrompt, FilesAreReadByTask) {
  const auto templates = read_templates(file(R"({"qasper": "{context} {input}", "lcc": "Code: {context}"})"));
  EXPECT_EQ(templates.size(), 2u);
  EXPECT_EQ(templates.at("lcc"), "Code: {context}");
  const auto lengths = read_answer_lengths(file(R"({"qasper": 128, "gov_report": 512})"));
  EXPECT_EQ(lengths.at("gov_report"), 512);
}

TEST_F(LongBenchPrompt, DamagedFilesAreNamed) {
  EXPECT_THROW(read_templates(directory_ / "missing.json"), UserError);
  for (const char* text : {"", "[]", "{\"qasper\": 3}", "{\"qasper\": \"no place for it\"}"})
    EXPECT_THROW(read_templates(file(text)), UserError) << text;
  for (const char* text : {"3", "{\"qasper\": \"64\"}", "{\"qasper\": 0}", "{\"qasper\": 1.5}"})
    EXPECT_THROW(read_answer_lengths(file(text)), UserError) << text;
}

}  // namespace
}  // namespace sb::longbench
