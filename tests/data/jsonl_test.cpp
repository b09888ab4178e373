#include "data/text/jsonl.h"

#include <gtest/gtest.h>

#include "core/errors.h"
#include "core/utf8.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

TEST(Jsonl, TheThreeKinds) {
  JsonlRecord record = parse_jsonl_record(R"({"id": 7, "text": "a\u00e9\ud83d\ude42\n"})");
  EXPECT_EQ(record.kind, JsonlRecord::Kind::text);
  EXPECT_EQ(record.text, "aé🙂\n");
  record = parse_jsonl_record(R"({"prompt": "", "completion": "x"})");
  EXPECT_EQ(record.kind, JsonlRecord::Kind::completion);
  EXPECT_EQ(record.completion, "x");
  record = parse_jsonl_record(
      R"({"messages": [{"role": "user", "content": "q", "name": "n"}, {"role": "assistant", "content": "a"}]})");
  EXPECT_EQ(record.kind, JsonlRecord::Kind::messages);
  ASSERT_EQ(record.messages.size(), 2u);
  EXPECT_EQ(record.messages[1].role, "assistant");
  EXPECT_EQ(record.messages[1].content, "a");
  EXPECT_EQ(parse_jsonl_record(R"({"content": "t"})", "content").text, "t");
}

TEST(Jsonl, ContentMayBePartsOfText) {
  const JsonlRecord record = parse_jsonl_record(
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]},
                       {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]})");
  ASSERT_EQ(record.messages.size(), 2u);
  EXPECT_EQ(record.messages[0].content, "p\nq");
  EXPECT_EQ(record.messages[1].content, "a");
}

TEST(Jsonl, ShareGptIsAChat) {
  const JsonlRecord record = parse_jsonl_record(
      R"({"id": "x", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
          {"from": "gpt", "value": "a"}]})");
  EXPECT_EQ(record.kind, JsonlRecord::Kind::messages);
  ASSERT_EQ(record.messages.size(), 3u);
  EXPECT_EQ(record.messages[0].role, "system");
  EXPECT_EQ(record.messages[1].role, "user");
  EXPECT_EQ(record.messages[1].content, "q");
  EXPECT_EQ(record.messages[2].role, "assistant");
  EXPECT_EQ(record.messages[2].content, "a");
}

TEST(Jsonl, AlpacaIsAPromptWithACompletion) {
  JsonlRecord record = parse_jsonl_record(R"({"instruction": "Add.", "input": "1 2", "output": "3"})");
  EXPECT_EQ(record.kind, JsonlRecord::Kind::completion);
  EXPECT_EQ(record.prompt, "Add.\n1 2\n");
  EXPECT_EQ(record.completion, "3");
  for (const char* line :
       {R"({"instruction": "Sing.", "input": "", "output": "La"})", R"({"instruction": "Sing.", "output": "La"})"})
    EXPECT_EQ(parse_jsonl_record(line).prompt, "Sing.\n") << line;
}

// As UltraChat has it: the first message once more.
TEST(Jsonl, APromptBesideAChatIsPassedOver) {
  const JsonlRecord record = parse_jsonl_record(
      R"({"prompt": "q", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})");
  EXPECT_EQ(record.kind, JsonlRecord::Kind::messages);
  EXPECT_EQ(record.messages.size(), 2u);
}

TEST(Jsonl, BadLinesSayWhatIsWrong) {
  const auto error = [](const std::string& line) { return user_error([&] { parse_jsonl_record(line); }); };
  const std::pair<const char*, const char*> cases[] = {
      {"", "invalid JSON"},
      {"{", "invalid JSON"},
      {R"({"text": "a"} x)", "invalid JSON"},
      {R"({"text": "\ud800"})", "invalid JSON"},
      {R"({"text": "a", "n": 1e99999})", "unreadable JSON"},
      {"[1]", "object"},
      {"3", "object"},
      {"{}", "(Alpaca) is present; name the key of plain text with --text-key"},
      {R"({"url": 1, "content": "a"})",
       "(Alpaca) is present among \"content\", \"url\"; name the key of plain text with --text-key"},
      {R"({"text": 3})", "must be a string"},
      {R"({"text": null})", "must be a string"},
      {R"({"text": ""})", "empty"},
      {R"({"text": "a", "messages": []})", "more than one"},
      {R"({"prompt": "a", "completion": "b", "text": "c"})", "keep only one, for example with `jq"},
      {R"({"prompt": "a"})", "\"completion\" is missing"},
      {R"({"completion": "a"})", "\"prompt\" is missing"},
      {R"({"prompt": "a", "completion": ""})", "no target"},
      {R"({"messages": []})", "list that is not empty"},
      {R"({"messages": [{"role": "assistant", "content": [3]}]})", "message 1: part 1: must be an object"},
      {R"({"messages": [{"role": "assistant", "content": [{"text": "a"}]}]})", "part 1: \"type\" is missing"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]})",
       "message 1: part 2: is of the type \"image_url\""},
      {R"({"messages": {}})", "list that is not empty"},
      {R"({"messages": [3]})", "message 1: must be an object"},
      {R"({"messages": [{"role": "user", "content": "a"}]})", "no target"},
      {R"({"messages": [{"role": "assistant", "content": "a"}, {"role": "user"}]})", "message 2: \"content\""},
      {R"({"messages": [{"role": "", "content": "a"}]})", "role"},
      {R"({"conversations": [{"from": "human", "value": "a"}]})", "no target"},
      {R"({"conversations": [{"from": "tool", "value": "a"}]})", "\"from\" is \"tool\"; expected human"},
      {R"({"conversations": [{"from": "gpt"}]})", "message 1: \"value\" is missing"},
      {R"({"instruction": "a"})", "\"output\" is missing"},
      {R"({"instruction": "a", "output": ""})", "no target: \"output\" is empty"},
      {R"({"instruction": "a", "output": "b", "text": "c"})", "more than one"},
  };
  for (const auto& [line, part] : cases)
    EXPECT_NE(error(line).find(part), std::string::npos) << line << " gave: " << error(line);
  EXPECT_NE(error("{\"text\": \"ab\xff\"}").find("invalid UTF-8 at byte 12"), std::string::npos);
}

TEST(Jsonl, DeepNestingIsNoProblem) {
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  EXPECT_NE(user_error([&] { parse_jsonl_record(deep); }).find("object"), std::string::npos);
  EXPECT_NE(user_error([&] { parse_jsonl_record(std::string(200000, '[')); }).find("invalid JSON"), std::string::npos);
}

// What the file holds reaches no terminal as a command: ESC, DEL, and CSI as one character.
TEST(Jsonl, ErrorsEscapeWhatTerminalsObey) {
  const std::string error = user_error([] { parse_jsonl_record("{\"\u00e9\x1b[2J\x7f\u009b2J\u00a0"); });
  EXPECT_NE(error.find("near \"{\"\u00e9\\x1b"), std::string::npos) << error;
  EXPECT_EQ(printable("\u00e9\x1b[2J\x7f\u009b2J\u00a0\xc2\x80"), "\u00e9\\x1b[2J\\x7f\\x9b2J\u00a0\\x80");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("abc\u00e9", 4), "abc\ufffd...");
}

TEST(Jsonl, Lines) {
  const std::string text = "a\r\n\nb\n \nlast";
  std::vector<std::string> lines;
  std::string_view line;
  for (size_t offset = 0; next_line(text, offset, line);) lines.emplace_back(line);
  EXPECT_EQ(lines, (std::vector<std::string>{"a", "", "b", " ", "last"}));
  EXPECT_TRUE(is_blank(" \t"));
  EXPECT_FALSE(is_blank(" x"));
}

}  // namespace
}  // namespace sb
