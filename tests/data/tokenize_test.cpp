#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "data/files/label_mask.h"
#include "data/files/token_file.h"
#include "data/files/token_writer.h"
#include "data/text/document_encoder.h"
#include "data/text/token_origin.h"
#include "data/text/tokenize_job.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

const char* const kQwen = "/tokenizer_qwen2_style/tokenizer.json";

const Tokenizer& qwen() {
  static const Tokenizer tokenizer = Tokenizer::load(std::string(SB_TEST_DATA) + kQwen);
  return tokenizer;
}

std::string targets_text(const EncodedDocument& document) {
  std::vector<int32_t> ids;
  for (size_t t = 0; t < document.tokens.size(); ++t)
    if (document.targets.empty() || document.targets[t]) ids.push_back(document.tokens[t]);
  return qwen().decode(ids);
}

TEST(DocumentEncoder, ChatIsWrittenAsChatMl) {
  const DocumentEncoder encoder(qwen(), {});
  const EncodedDocument document = encoder.encode(parse_jsonl_record(
      R"({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
          {"role": "assistant", "content": "hello there"}, {"role": "user", "content": "bye"},
          {"role": "assistant", "content": "so long"}]})"));
  const std::string whole =
      "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello there"
      "<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\nso long<|im_end|>\n";
  EXPECT_EQ(qwen().decode(document.tokens), whole);
  EXPECT_EQ(document.tokens, qwen().encode(whole)) << "as encoding the whole text at once";
  EXPECT_EQ(targets_text(document), "hello there<|im_end|>so long<|im_end|>");
}

// The tokenizer of the reference files with Llama-3's pre-tokenizer, and the names of its chat tokens.
const Tokenizer& llama3() {
  static const Tokenizer tokenizer = [] {
    std::ifstream file(std::string(SB_TEST_DATA) + "/tokenizer_reference/llama3_style.json");
    nlohmann::json json = nlohmann::json::parse(file);
    for (const char* name : {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"})
      json["added_tokens"].push_back({{"id", 500 + json["added_tokens"].size()}, {"content", name}, {"special", true}});
    return Tokenizer::parse(json.dump(), "llama3");
  }();
  return tokenizer;
}

TEST(DocumentEncoder, ChatIsWrittenInLlama3sFormWhereItsTokensAre) {
  const EncodedDocument document =
      DocumentEncoder(llama3(), {})
          .encode(parse_jsonl_record(
              R"({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hi\n"},
          {"role": "assistant", "content": "\nhello <|eot_id|> there "}, {"role": "user", "content": "bye"},
          {"role": "assistant", "content": "so long"}]})"));
  const std::string whole =
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
      "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\nhello <|eot_id|> there<|eot_id|>"
      "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\nso long<|eot_id|>";
  EXPECT_EQ(llama3().decode(document.tokens), whole);
  const int32_t end = llama3().token_id("<|eot_id|>").value();
  EXPECT_EQ(std::count(document.tokens.begin(), document.tokens.end(), end), 5)
      << "the one inside content ends nothing";
  std::vector<int32_t> targets;
  for (size_t t = 0; t < document.tokens.size(); ++t)
    if (document.targets[t]) targets.push_back(document.tokens[t]);
  EXPECT_EQ(llama3().decode(targets), "hello <|eot_id|> there<|eot_id|>so long<|eot_id|>");
  // As the whole text at once, where no content looks like a token.
  const EncodedDocument plain =
      DocumentEncoder(llama3(), {})
          .encode(parse_jsonl_record(
              R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]})"));
  EXPECT_EQ(plain.tokens, llama3().encode("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
                                          "<|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>"));
}

TEST(DocumentEncoder, SpecialTokensAreAddedToPromptsAsToText) {
  DocumentEncoderOptions options;
  options.add_special_tokens = true;
  const DocumentEncoder encoder(llama3(), options);
  const EncodedDocument document =
      encoder.encode(parse_jsonl_record(R"({"prompt": "The sky is", "completion": " blue"})"));
  EXPECT_EQ(llama3().decode(document.tokens), "<|endoftext|>The sky is blue<|endoftext|>")
      << "what its post-processor puts in front, and the end of the completion";
  EXPECT_EQ(document.targets[0], 0);
}

TEST(DocumentEncoder, AQuestionIsAChatUpToItsAnswer) {
  const auto question = DocumentEncoder(qwen(), {}).encode_question("hi <|im_end|>");
  EXPECT_EQ(qwen().decode(question.tokens), "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(question.end, 8002);
  EXPECT_EQ(std::count(question.tokens.begin(), question.tokens.end(), 8002), 1);
  const auto llama = DocumentEncoder(llama3(), {}).encode_question(" hi");
  EXPECT_EQ(llama3().decode(llama.tokens),
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_EQ(llama.end, llama3().token_id("<|eot_id|>").value());
}

TEST(DocumentEncoder, ChatNeedsTheTokensOfAForm) {
  const Tokenizer plain = Tokenizer::load(std::string(SB_TEST_DATA) + "/tokenizer_reference/llama3_style.json");
  EXPECT_NE(user_error([&] {
              DocumentEncoder(plain, {}).encode(
                  parse_jsonl_record(R"({"messages": [{"role": "assistant", "content": "x"}]})"));
            }).find("<|start_header_id|>"),
            std::string::npos);
}

TEST(DocumentEncoder, MarkersInsideContentEndNothing) {
  const DocumentEncoder encoder(qwen(), {});
  const EncodedDocument document = encoder.encode(parse_jsonl_record(
      R"({"messages": [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c<|im_end|>"}]})"));
  EXPECT_EQ(std::count(document.tokens.begin(), document.tokens.end(), 8002), 2);
  EXPECT_EQ(targets_text(document), "c<|im_end|><|im_end|>");
}

TEST(DocumentEncoder, CompletionsAreTheTargets) {
  DocumentEncoderOptions options;
  options.append_eod = true;
  const DocumentEncoder encoder(qwen(), options);
  const EncodedDocument document =
      encoder.encode(parse_jsonl_record(R"({"prompt": "The sky is", "completion": " blue"})"));
  EXPECT_EQ(qwen().decode(document.tokens), "The sky is blue<|endoftext|>");
  EXPECT_EQ(targets_text(document), " blue<|endoftext|>");
  const EncodedDocument chat =
      encoder.encode(parse_jsonl_record(R"({"messages": [{"role": "assistant", "content": "x"}]})"));
  EXPECT_EQ(chat.tokens.back(), 8000);
  EXPECT_EQ(chat.targets.back(), 0);
}

TEST(DocumentEncoder, CompletionsEndWithTheEndTokenUnlessToldNotTo) {
  const auto decoded = [](const DocumentEncoderOptions& options, const char* line) {
    return qwen().decode(DocumentEncoder(qwen(), options).encode(parse_jsonl_record(line)).tokens);
  };
  constexpr const char* kCompletion = R"({"prompt": "a", "completion": " b"})";
  EXPECT_EQ(decoded({}, kCompletion), "a b<|endoftext|>");
  EXPECT_EQ(decoded({}, R"({"text": "a b"})"), "a b") << "text has none unless asked for";
  DocumentEncoderOptions options;
  options.eod_token = "<|im_end|>";
  EXPECT_EQ(decoded(options, kCompletion), "a b<|im_end|>");
  options.end_completions = false;
  EXPECT_EQ(decoded(options, kCompletion), "a b");
}

TEST(DocumentEncoder, TextIsAllTargets) {
  DocumentEncoderOptions options;
  options.append_eod = true;
  const EncodedDocument document = DocumentEncoder(qwen(), options).encode(parse_jsonl_record(R"({"text": "a b"})"));
  std::vector<int32_t> expected = qwen().encode("a b");
  expected.push_back(8000);
  EXPECT_EQ(document.tokens, expected);
  EXPECT_TRUE(document.targets.empty());
  options.eod_token = "<|im_end|>";
  EXPECT_EQ(DocumentEncoder(qwen(), options).encode(parse_jsonl_record(R"({"text": "a"})")).tokens.back(), 8002);
  options.eod_token = "<eos>";
  EXPECT_THROW(DocumentEncoder(qwen(), options), UserError);
  // One token alone has nothing to be predicted from.
  EXPECT_NE(
      user_error([&] { DocumentEncoder(qwen(), {}).encode(parse_jsonl_record(R"({"text": "a"})")); }).find("no target"),
      std::string::npos);
}

class TokenizeFiles : public testing::Test {
 protected:
  TokenizeOptions options(std::vector<std::string> inputs, const std::string& output) {
    TokenizeOptions o;
    o.tokenizer = std::string(SB_TEST_DATA) + kQwen;
    for (const std::string& input : inputs) o.inputs.push_back(folder_.path(input));
    o.output = folder_.path(output);
    return o;
  }
  static TokenizeProgress run(const TokenizeOptions& o) {
    return tokenize_files(o, [](const TokenizeProgress&) {});
  }

  // Interrupted after each batch in turn.
  void expect_the_same_when_interrupted(const std::vector<std::string>& inputs, const std::string& expected) {
    struct Stop {};
    TokenizeOptions o = options(inputs, "out");
    o.checkpoint_seconds = 0.0;
    int64_t last = -1;
    int interruptions = 0;
    while (true) {
      try {
        const TokenizeProgress done = tokenize_files(o, [&](const TokenizeProgress& p) {
          if (p.bytes > last) {
            last = p.bytes;
            throw Stop();
          }
        });
        EXPECT_GT(done.resumed_bytes, 0);
        break;
      } catch (const Stop&) {
        ++interruptions;
        ASSERT_LT(interruptions, 20);
        EXPECT_FALSE(fs::exists(folder_.path("out.idx")));
        o.workers = 1 + interruptions % 3;
      }
    }
    EXPECT_GE(interruptions, 2);
    for (const char* suffix : {".bin", ".idx", ".mask"})
      EXPECT_EQ(read_bytes(folder_.path("out") + suffix), read_bytes(folder_.path(expected) + suffix)) << suffix;
    for (const char* suffix : {".bin", ".idx", ".mask"}) fs::remove(folder_.path("out") + suffix);
  }

  TemporaryFolder folder_;
};

TEST_F(TokenizeFiles, OneDocumentALine) {
  write_bytes(folder_.path("a.jsonl"), "{\"text\": \"Hello, world!\"}\n\n{\"text\": \"don't stop\"}\r\n");
  write_bytes(folder_.path("b.jsonl"), R"({"prompt": "1 + 1 =", "completion": " 2"})");
  TokenizeOptions o = options({"a.jsonl", "b.jsonl"}, "out");
  o.documents.append_eod = true;
  const TokenizeProgress progress = run(o);
  EXPECT_EQ(progress.documents, 3);
  EXPECT_EQ(progress.bytes, progress.total_bytes);
  const auto file = open_token_file(folder_.path("out"));
  ASSERT_EQ(file->documents(), 3);
  EXPECT_EQ(file->type(), TokenType::u16);
  const std::string texts[] = {"Hello, world!<|endoftext|>", "don't stop<|endoftext|>", "1 + 1 = 2<|endoftext|>"};
  for (int64_t d = 0; d < 3; ++d) {
    std::vector<int32_t> tokens(static_cast<size_t>(file->length(d)));
    file->read(d, 0, file->length(d), tokens.data());
    EXPECT_EQ(qwen().decode(tokens), texts[d]);
  }
  ASSERT_NE(file->mask(), nullptr);
  EXPECT_EQ(file->mask()->valid_targets(0), file->length(0) - 1);
  EXPECT_EQ(file->mask()->valid_targets(2), 1 + static_cast<int64_t>(qwen().encode(" 2").size()));
  EXPECT_NE(user_error([&] { run(o); }).find("already exists"), std::string::npos);
  o.overwrite = true;
  EXPECT_EQ(run(o).documents, 3);
}

TEST_F(TokenizeFiles, TheTokenizerIsRecordedBesideTheTokens) {
  write_bytes(folder_.path("a.jsonl"), "{\"text\": \"some words here\"}\n");
  const TokenizeOptions o = options({"a.jsonl"}, "out");
  run(o);
  for (const char* suffix : {"", ".bin", ".idx"}) {
    const std::optional<TokenOrigin> origin = read_token_origin(folder_.path("out") + suffix);
    ASSERT_TRUE(origin) << suffix;
    EXPECT_EQ(origin->tokenizer, o.tokenizer);
    EXPECT_EQ(origin->vocab_size, qwen().vocab_size());
    EXPECT_EQ(origin->fingerprint, origin_of(qwen()).fingerprint);
  }
  EXPECT_NE(origin_of(llama3()).fingerprint, origin_of(qwen()).fingerprint);
  EXPECT_FALSE(read_token_origin(folder_.path("none"))) << "files of other programs have none";
  write_bytes(folder_.path("out.origin.json"), "{");
  EXPECT_NE(user_error([&] { read_token_origin(folder_.path("out")); }).find("out.origin.json: damaged"),
            std::string::npos);
  // Tokens that replace these and come from no tokenizer take the record along.
  TokenWriter::Options writing;
  writing.overwrite = true;
  TokenWriter writer(folder_.path("out"), writing);
  writer.add(std::vector<int32_t>{1, 2, 3});
  writer.finish();
  EXPECT_FALSE(fs::exists(folder_.path("out.origin.json")));
}

TEST_F(TokenizeFiles, BadLinesAreNamedOrCounted) {
  write_bytes(folder_.path("a.jsonl"),
              "{\"text\": \"good one\"}\n{\"text\": oops}\n{\"text\": \"good two\"}\n"
              "{\"text\": \"bad \xff\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n");
  TokenizeOptions o = options({"a.jsonl"}, "out");
  const std::string error = user_error([&] { run(o); });
  EXPECT_NE(error.find("a.jsonl:2: invalid JSON"), std::string::npos) << error;
  EXPECT_FALSE(fs::exists(folder_.path("out.idx")));
  o.skip_bad_lines = true;
  const TokenizeProgress progress = run(o);
  EXPECT_EQ(progress.documents, 2);
  EXPECT_EQ(progress.bad_lines, 3);
}

TEST_F(TokenizeFiles, WhatIsNotJsonlIsCalledByItsName) {
  const std::pair<std::string, const char*> cases[] = {
      {"\x1f\x8b\b", "gzip"},       {"\x28\xb5\x2f\xfd", "zstd"}, {"BZh9", "compressed"},
      {"PK\x03\x04", "compressed"}, {"PAR1\x15", "Parquet"},      {"\n[\n{\"text\": \"a b c\"}\n]\n", "a JSON array"},
  };
  for (const auto& [bytes, name] : cases) {
    write_bytes(folder_.path("a.jsonl"), bytes);
    TokenizeOptions o = options({"a.jsonl"}, "out");
    o.skip_bad_lines = true;
    const std::string error = user_error([&] { run(o); });
    EXPECT_NE(error.find(std::string("a.jsonl: ")), std::string::npos) << error;
    EXPECT_NE(error.find(name), std::string::npos) << error;
  }
}

TEST_F(TokenizeFiles, EmptyInputs) {
  write_bytes(folder_.path("empty.jsonl"), "");
  write_bytes(folder_.path("blank.jsonl"), "\n \n\n");
  EXPECT_NE(user_error([&] { run(options({"empty.jsonl"}, "out")); }).find("empty"), std::string::npos);
  EXPECT_NE(user_error([&] { run(options({"blank.jsonl"}, "out")); }).find("no line could be turned into a document"),
            std::string::npos);
  EXPECT_THROW(run(options({"none.jsonl"}, "out")), UserError);
  EXPECT_THROW(run(options({}, "out")), UserError);
  EXPECT_FALSE(fs::exists(folder_.path("out.idx")));
}

// Interrupted by an exception after each batch in turn, the run gives the same files as one that is not, whatever the
// number of workers, and compressed text gives those of plain text.
TEST_F(TokenizeFiles, AnInterruptedRunGoesOn) {
  std::string lines;
  for (int i = 0; i < 3000; ++i) {
    lines += "{\"text\": \"line " + std::to_string(i) + " of the file";
    for (int w = 0; w < 400; ++w) lines += " word" + std::to_string(i * 31 % 97 + w);
    lines += "\"}\n";
  }
  write_bytes(folder_.path("a.jsonl"), lines);
  write_bytes(folder_.path("b.jsonl"), R"({"prompt": "x", "completion": "y z"})");
  ASSERT_GT(lines.size(), 8u << 20) << "more than two batches";
  run(options({"a.jsonl", "b.jsonl"}, "straight"));

  gzFile packed = gzopen(folder_.path("a.jsonl.gz").c_str(), "wb");
  ASSERT_EQ(gzwrite(packed, lines.data(), static_cast<unsigned>(lines.size())), std::ssize(lines));
  gzclose(packed);
  for (const char* input : {"a.jsonl", "a.jsonl.gz"}) expect_the_same_when_interrupted({input, "b.jsonl"}, "straight");
}

TEST_F(TokenizeFiles, AnotherRunsRemainsAreNotMixedIn) {
  write_bytes(folder_.path("a.jsonl"), "{\"text\": \"some words here\"}\n");
  TokenizeOptions o = options({"a.jsonl"}, "out");
  o.checkpoint_seconds = 0.0;
  struct Stop {};
  EXPECT_THROW(tokenize_files(o, [](const TokenizeProgress&) { throw Stop(); }), Stop);
  o.documents.append_eod = true;
  EXPECT_NE(user_error([&] { run(o); }).find("--restart"), std::string::npos);
  o.restart = true;
  EXPECT_EQ(run(o).documents, 1);
}

// Of the same size: neither text nor tokenizer may have changed under what is done already.
TEST_F(TokenizeFiles, ChangedTextOrTokenizerIsNotMixedWithTheOld) {
  const std::string old_text = "{\"text\": \"some words here\"}\n", new_text = "{\"text\": \"some words HERE\"}\n";
  write_bytes(folder_.path("a.jsonl"), old_text);
  write_bytes(folder_.path("b.jsonl"), old_text);
  const std::string tokenizer = read_bytes(std::string(SB_TEST_DATA) + kQwen);
  write_bytes(folder_.path("tokenizer.json"), tokenizer);
  TokenizeOptions o = options({"a.jsonl", "b.jsonl"}, "out");
  o.tokenizer = folder_.path("tokenizer.json");
  o.checkpoint_seconds = 0.0;
  struct Stop {};
  EXPECT_THROW(tokenize_files(o, [](const TokenizeProgress&) { throw Stop(); }), Stop);

  write_bytes(folder_.path("a.jsonl"), new_text);
  const std::string changed = user_error([&] { run(o); });
  EXPECT_NE(changed.find("a.jsonl has changed since"), std::string::npos) << changed;
  EXPECT_NE(changed.find("--restart"), std::string::npos) << changed;
  write_bytes(folder_.path("a.jsonl"), old_text);

  // A blank for the end of a line: another file of the same size.
  std::string other = tokenizer;
  const size_t blank = other.find('\n');
  ASSERT_NE(blank, std::string::npos);
  other[blank] = ' ';
  write_bytes(folder_.path("tokenizer.json"), other);
  EXPECT_NE(user_error([&] { run(o); }).find("--restart"), std::string::npos);
  write_bytes(folder_.path("tokenizer.json"), tokenizer);

  // What was not read yet may change.
  write_bytes(folder_.path("b.jsonl"), new_text);
  EXPECT_EQ(run(o).documents, 2);
  run(options({"a.jsonl", "b.jsonl"}, "straight"));
  EXPECT_EQ(read_bytes(folder_.path("out.bin")), read_bytes(folder_.path("straight.bin")));
}

// What an interrupted run left may have been damaged since, by a disk or by hand.
TEST_F(TokenizeFiles, ADamagedStateIsRefused) {
  write_bytes(folder_.path("a.jsonl"), "{\"text\": \"some words here\"}\n");
  write_bytes(folder_.path("b.jsonl"), "{\"text\": \"and others\"}\n");
  TokenizeOptions o = options({"a.jsonl", "b.jsonl"}, "out");
  o.checkpoint_seconds = 0.0;
  struct Stop {};
  EXPECT_THROW(tokenize_files(o, [](const TokenizeProgress&) { throw Stop(); }), Stop);
  const std::string file = folder_.path("out.partial/state.json");
  const nlohmann::json good = nlohmann::json::parse(read_bytes(file));
  const auto expect_refused = [&](const std::string& text, const char* part) {
    write_bytes(file, text);
    const std::string error = user_error([&] { run(o); });
    EXPECT_NE(error.find("state.json: damaged"), std::string::npos) << error;
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  const auto with_note = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json state = good, note = nlohmann::json::parse(good.at("note").get<std::string>());
    note[key] = value;
    state["note"] = note.dump();
    return state.dump();
  };
  for (const char* key : {"file", "offset", "line", "bad_lines"})
    for (const nlohmann::json& value : {nlohmann::json(400000000), nlohmann::json(-1), nlohmann::json(UINT64_MAX),
                                        nlohmann::json(1e30), nlohmann::json("x"), nlohmann::json()})
      expect_refused(with_note(key, value), key);
  for (const char* key : {"documents", "tokens", "bitmap_bytes", "version"})
    for (const nlohmann::json& value : {nlohmann::json(-1), nlohmann::json(INT64_MAX), nlohmann::json(UINT64_MAX),
                                        nlohmann::json(1e30), nlohmann::json("x"), nlohmann::json()}) {
      nlohmann::json state = good;
      state[key] = value;
      expect_refused(state.dump(), key);
    }
  nlohmann::json state = good;
  state["note"] = "not JSON";
  expect_refused(state.dump(), "--restart");
  state["note"] = "{}";
  expect_refused(state.dump(), "identity");
  state["note"] = 3;
  expect_refused(state.dump(), "delete the directory");
  write_bytes(file, good.dump());
  EXPECT_EQ(run(o).documents, 2);
}

}  // namespace
}  // namespace sb
