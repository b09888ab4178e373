#include "data/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/random.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

using nlohmann::json;

std::string fixture(const std::string& name) {
  return std::string(SB_TEST_DATA) + "/" + name;
}

json read_json(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

void append_utf8(std::string& text, char32_t code) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(static_cast<unsigned char>(byte)); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xC0 | code >> 6);
    add(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3F));
    add(0x80 | (code & 0x3F));
  } else {
    add(0xF0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3F));
    add(0x80 | (code >> 6 & 0x3F));
    add(0x80 | (code & 0x3F));
  }
}

// A tokenizer of the 256 bytes alone, to be changed by a test.
json byte_tokenizer() {
  json vocab = json::object();
  const auto visible = [](int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; };
  char32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    std::string text;
    append_utf8(text, visible(b) ? static_cast<char32_t>(b) : next++);
    vocab[text] = b;
  }
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}},
          {"added_tokens", json::array()},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
          {"decoder", {{"type", "ByteLevel"}}}};
}

std::string error_of(const json& spec) {
  try {
    Tokenizer::parse(spec.dump(), "some.json");
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

std::string random_text(Random& random, size_t characters) {
  std::string text;
  for (size_t i = 0; i < characters; ++i) {
    const uint64_t kind = random.below(8);
    char32_t code = 0;
    if (kind < 3)
      code = static_cast<char32_t>(random.below(0x80));
    else if (kind < 5)
      code = static_cast<char32_t>(0x80 + random.below(0x800));
    else if (kind < 7)
      code = static_cast<char32_t>(random.below(0xD800));
    else
      code = static_cast<char32_t>(0xE000 + random.below(0x110000 - 0xE000));
    append_utf8(text, code);
  }
  return text;
}

TEST(Tokenizer, Qwen2StyleFixture) {
  const Tokenizer tokenizer = Tokenizer::load(fixture("tokenizer_qwen2_style/tokenizer.json"));
  const json cases = read_json(fixture("tokenizer_qwen2_style/expected.json"));
  ASSERT_EQ(cases.size(), 19u);
  for (const json& expected : cases) {
    const auto text = expected["text"].get<std::string>();
    SCOPED_TRACE(text);
    const std::vector<int32_t> ids = tokenizer.encode(text);
    EXPECT_EQ(ids, expected["ids"].get<std::vector<int32_t>>());
    EXPECT_EQ(tokenizer.decode(ids), expected["decoded"].get<std::string>());
  }
  EXPECT_EQ(tokenizer.vocab_size(), 8003);
  EXPECT_EQ(tokenizer.token_id("<|im_end|>"), 8002);
  EXPECT_EQ(tokenizer.token_id("<|no such|>"), std::nullopt);
}

class ReferenceTokenizer : public testing::TestWithParam<const char*> {};

TEST_P(ReferenceTokenizer, GivesWhatTheNaiveImplementationGave) {
  const std::string base = fixture("tokenizer_reference/") + GetParam();
  const Tokenizer tokenizer = Tokenizer::load(base + ".json");
  const json cases = read_json(base + ".expected.json");
  ASSERT_GE(cases.size(), 20u);
  for (const json& expected : cases) {
    const auto text = expected["text"].get<std::string>();
    EXPECT_EQ(tokenizer.encode(text), expected["ids"].get<std::vector<int32_t>>()) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, ReferenceTokenizer,
                         testing::Values("gpt2_style", "gpt2_prefix_space", "llama3_style", "llama3_removed_nfc"));

TEST(Tokenizer, RoundTripOnRandomUnicode) {
  const Tokenizer plain = Tokenizer::load(fixture("tokenizer_reference/gpt2_style.json"));
  const Tokenizer llama = Tokenizer::load(fixture("tokenizer_reference/llama3_style.json"));
  const Tokenizer nfc = Tokenizer::load(fixture("tokenizer_qwen2_style/tokenizer.json"));
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const std::string text = random_text(random, 1 + random.below(60));
    EXPECT_EQ(plain.decode(plain.encode(text)), text);
    EXPECT_EQ(llama.decode(llama.encode(text)), text);
    // Normalised text is a fixed point.
    const std::vector<int32_t> ids = nfc.encode(text);
    EXPECT_EQ(nfc.encode(nfc.decode(ids)), ids);
  }
}

TEST(Tokenizer, NormalForms) {
  struct Case {
    const char *form, *text, *expected;
  };
  const Case cases[] = {
      {"NFC", "e\u0301", "\u00e9"},
      {"NFC", "\u1112\u1161\u11ab", "\ud55c"},                              // Hangul
      {"NFC", "a\u0327\u0301 a\u0301\u0327", "\u00e1\u0327 \u00e1\u0327"},  // marks are put in order first
      {"NFC", "\u0958", "\u0915\u093c"},                                    // excluded from composition
      {"NFC", "\u212b\u2126", "\u00c5\u03a9"},
      {"NFC", "\ufb01", "\ufb01"},
      {"NFKC", "\ufb01", "fi"},
      {"NFD", "\u00e9", "e\u0301"},
      {"NFKD", "\u00bd", "1\u20442"},
  };
  for (const Case& c : cases) {
    json spec = byte_tokenizer();
    spec["normalizer"] = {{"type", c.form}};
    const Tokenizer tokenizer = Tokenizer::parse(spec.dump(), "x");
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(c.text)), c.expected) << c.form << " " << c.text;
  }
}

TEST(Tokenizer, InvalidUtf8IsNamedByItsPlace) {
  const Tokenizer tokenizer = Tokenizer::load(fixture("tokenizer_reference/gpt2_style.json"));
  for (const auto& [text, place] : std::vector<std::pair<std::string, std::string>>{{"abc\xff", "byte 3"},
                                                                                    {"\xc3", "byte 0"},
                                                                                    {"a\xe2\x82z", "byte 1"},
                                                                                    {"\xed\xa0\x80", "byte 0"},
                                                                                    {"0123456789\xc0\x80", "byte 10"},
                                                                                    {"\xf4\x90\x80\x80", "byte 0"}}) {
    try {
      tokenizer.encode(text);
      ADD_FAILURE() << "accepted";
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(place), std::string::npos) << error.what();
    }
  }
}

TEST(Tokenizer, DecodingReplacesWhatIsNoCharacter) {
  const Tokenizer tokenizer = Tokenizer::parse(byte_tokenizer().dump(), "bytes.json");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{'a', 0xE2, 0x82, 'b'}), "a\ufffdb");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{0xE2, 0x82, 0xAC}), "\u20ac");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{0xFF, 0xC0, 0x80}), "\ufffd\ufffd\ufffd");
  EXPECT_EQ(tokenizer.token_bytes(0xE2), "\xE2");
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{256}), UserError);
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{-1}), UserError);
}

TEST(Tokenizer, SpecialTokensOnRequestOnly) {
  const Tokenizer tokenizer = Tokenizer::load(fixture("tokenizer_reference/llama3_style.json"));
  const int32_t special = tokenizer.token_id("<|endoftext|>").value();
  const std::vector<int32_t> plain = tokenizer.encode("the");
  EncodeOptions add;
  add.add_special_tokens = true;
  std::vector<int32_t> with = tokenizer.encode("the", add);
  ASSERT_EQ(with.size(), plain.size() + 1);
  EXPECT_EQ(with.front(), special);
  EXPECT_EQ(tokenizer.decode(with), "<|endoftext|>the");
  EXPECT_EQ(tokenizer.decode(with, true), "the");
  EncodeOptions as_text;
  as_text.parse_added_tokens = false;
  const std::vector<int32_t> spelled = tokenizer.encode("<|endoftext|>", as_text);
  EXPECT_GT(spelled.size(), 1u);
  EXPECT_EQ(tokenizer.decode(spelled), "<|endoftext|>");
}

TEST(Tokenizer, NormalizedAddedTokensMatchAfterNormalisation) {
  json spec = byte_tokenizer();
  spec["normalizer"] = {{"type", "NFC"}};
  spec["added_tokens"] = {{{"id", 300}, {"content", "caf\u00e9"}, {"normalized", true}},
                          {{"id", 301}, {"content", "na\u00efve"}, {"normalized", false}},
                          {{"id", 302}, {"content", "caf"}, {"normalized", true}}};
  const Tokenizer tokenizer = Tokenizer::parse(spec.dump(), "x");
  EXPECT_EQ(tokenizer.encode("cafe\u0301"), std::vector<int32_t>{300});
  EXPECT_EQ(tokenizer.encode("cafx"), (std::vector<int32_t>{302, 'x'}));
  EXPECT_EQ(tokenizer.encode("na\u00efve"), std::vector<int32_t>{301});
  EXPECT_NE(tokenizer.encode("nai\u0308ve"), std::vector<int32_t>{301});
}

TEST(Tokenizer, LiteralSplitsAndDigits) {
  json spec = byte_tokenizer();
  spec["model"]["vocab"]["12"] = 256;
  spec["model"]["vocab"]["ab"] = 257;
  spec["model"]["merges"] = {"1 2", "a b"};
  const auto with = [&](json first) {
    spec["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers", {first, {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    return Tokenizer::parse(spec.dump(), "x").encode("a1b12ab");
  };
  EXPECT_EQ(with({{"type", "Digits"}, {"individual_digits", true}}),
            (std::vector<int32_t>{'a', '1', 'b', '1', '2', 257}));
  EXPECT_EQ(with({{"type", "Digits"}, {"individual_digits", false}}), (std::vector<int32_t>{'a', '1', 'b', 256, 257}));
  const json pattern = {{"String", "1"}};
  EXPECT_EQ(with({{"type", "Split"}, {"pattern", pattern}, {"behavior", "Isolated"}, {"invert", false}}),
            (std::vector<int32_t>{'a', '1', 'b', '1', '2', 257}));
  EXPECT_EQ(with({{"type", "Split"}, {"pattern", pattern}, {"behavior", "Removed"}, {"invert", false}}),
            (std::vector<int32_t>{'a', 'b', '2', 257}));
}

TEST(Tokenizer, RefusesByName) {
  const auto expect = [](const json& spec, const std::string& part) {
    const std::string error = error_of(spec);
    EXPECT_NE(error.find(part), std::string::npos) << error << " lacks " << part;
    EXPECT_EQ(error.rfind("some.json", 0), 0u) << error;
  };
  EXPECT_EQ(error_of(byte_tokenizer()), "no error");
  for (const char* type : {"WordPiece", "Unigram", "WordLevel"}) {
    json spec = byte_tokenizer();
    spec["model"]["type"] = type;
    expect(spec, type);
  }
  json spec = byte_tokenizer();
  spec["model"]["byte_fallback"] = true;
  expect(spec, "byte_fallback");
  spec = byte_tokenizer();
  spec["model"]["dropout"] = 0.1;
  expect(spec, "dropout");
  spec = byte_tokenizer();
  spec["model"]["end_of_word_suffix"] = "</w>";
  expect(spec, "end_of_word_suffix");
  spec = byte_tokenizer();
  spec["normalizer"] = {{"type", "Lowercase"}};
  expect(spec, "Lowercase");
  spec = byte_tokenizer();
  spec["pre_tokenizer"] = {{"type", "Metaspace"}};
  expect(spec, "Metaspace");
  spec["pre_tokenizer"] = nullptr;
  expect(spec, "ByteLevel");
  spec["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "("}}}, {"behavior", "Isolated"}};
  expect(spec, "ByteLevel");
  spec = byte_tokenizer();
  spec["post_processor"] = {{"type", "BertProcessing"}};
  expect(spec, "BertProcessing");
  spec = byte_tokenizer();
  spec["decoder"] = {{"type", "WordPiece"}};
  expect(spec, "WordPiece");
}

TEST(Tokenizer, RefusesDamagedFiles) {
  const auto damaged = [](const std::function<void(json&)>& change) {
    json spec = byte_tokenizer();
    change(spec);
    EXPECT_NE(error_of(spec), "no error") << spec.dump().substr(0, 200);
  };
  damaged([](json& s) { s.erase("model"); });
  damaged([](json& s) { s["model"].erase("vocab"); });
  damaged([](json& s) { s["model"]["vocab"] = json::object(); });
  damaged([](json& s) { s["model"]["vocab"]["x"] = -1; });
  damaged([](json& s) { s["model"]["vocab"]["x"] = 1.5; });
  damaged([](json& s) { s["model"]["vocab"]["xyz"] = 1ll << 40; });
  damaged([](json& s) { s["model"]["vocab"]["xyz"] = 7; });
  damaged([](json& s) { s["model"]["merges"] = {"a b"}; });
  damaged([](json& s) { s["model"]["merges"] = {"ab"}; });
  damaged([](json& s) { s["model"]["merges"] = {"a b c"}; });
  damaged([](json& s) { s["model"]["merges"] = {{"a", 1}}; });
  damaged([](json& s) { s["added_tokens"] = {{{"id", 300}, {"content", ""}}}; });
  damaged([](json& s) { s["added_tokens"] = {{{"id", 5}, {"content", "<x>"}}}; });
  damaged([](json& s) { s["added_tokens"] = {{{"id", 300}, {"content", "a"}}}; });
  damaged([](json& s) { s["added_tokens"] = {{{"content", "<x>"}}}; });
  damaged([](json& s) { s["added_tokens"] = 3; });
  damaged([](json& s) {
    s["post_processor"] = {
        {"type", "TemplateProcessing"}, {"single", json::array()}, {"special_tokens", json::object()}};
  });
  const auto pattern = [&](const char* text) {
    damaged([&](json& s) {
      s["pre_tokenizer"] = {
          {"type", "Sequence"},
          {"pretokenizers",
           {{{"type", "Split"}, {"pattern", {{"Regex", text}}}, {"behavior", "Isolated"}}, {{"type", "ByteLevel"}}}}};
    });
  };
  pattern("(");
  pattern("");
  pattern("[a-z&&[^x]]");
  pattern("\\");
  EXPECT_THROW(Tokenizer::parse("", "x"), UserError);
  EXPECT_THROW(Tokenizer::parse("[1, 2", "x"), UserError);
  EXPECT_THROW(Tokenizer::parse("3", "x"), UserError);
  EXPECT_THROW(Tokenizer::load(fixture("no such file.json")), UserError);
}

// As text: what builds or writes JSON walks the nesting on the stack as well.
TEST(Tokenizer, SequencesInsideSequencesHaveAnEnd) {
  const std::string plain = byte_tokenizer().dump();
  struct Part {
    const char *name, *list, *innermost;
  };
  for (const Part part : {Part{"normalizer", "normalizers", R"({"type": "NFC"})"},
                          Part{"pre_tokenizer", "pretokenizers", R"({"type": "ByteLevel", "add_prefix_space": false})"},
                          Part{"post_processor", "processors", R"({"type": "ByteLevel"})"},
                          Part{"decoder", "decoders", R"({"type": "ByteLevel"})"}}) {
    const auto nested = [&](int depth) {
      std::string text = fmt::format("{{\"{}\": ", part.name);
      for (int i = 0; i < depth; ++i) text += fmt::format(R"({{"type": "Sequence", "{}": [)", part.list);
      text += part.innermost;
      for (int i = 0; i < depth; ++i) text += "]}";
      json spec = json::parse(plain);
      spec.erase(part.name);
      return text + "," + spec.dump().substr(1);
    };
    EXPECT_EQ(Tokenizer::parse(nested(16), "x").encode("ab"), (std::vector<int32_t>{'a', 'b'})) << part.name;
    for (const int depth : {17, 200000}) {
      const std::string error = user_error([&] { Tokenizer::parse(nested(depth), "some.json"); });
      EXPECT_NE(error.find("nested deeper than 16"), std::string::npos) << part.name << ": " << error;
    }
  }
}

TEST(Tokenizer, ABacktrackingPatternEndsWithAnError) {
  json spec = byte_tokenizer();
  spec["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "(a+)+(a+)+$|(?:a?){40}b"}}}, {"behavior", "Isolated"}},
        {{"type", "ByteLevel"}}}}};
  const Tokenizer tokenizer = Tokenizer::parse(spec.dump(), "x");
  EXPECT_THROW(tokenizer.encode(std::string(3000, 'a') + "c"), UserError);
}

TEST(Tokenizer, ByteWithoutATokenIsAnError) {
  json spec = byte_tokenizer();
  spec["model"]["vocab"].erase("z");
  const Tokenizer tokenizer = Tokenizer::parse(spec.dump(), "x");
  EXPECT_EQ(tokenizer.encode("abc").size(), 3u);
  EXPECT_THROW(tokenizer.encode("abz"), UserError);
  spec["model"]["vocab"]["<unk>"] = 400;
  spec["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(Tokenizer::parse(spec.dump(), "x").encode("az"), (std::vector<int32_t>{'a', 400}));
}

TEST(Tokenizer, ThreadsGiveTheSame) {
  const Tokenizer tokenizer = Tokenizer::load(fixture("tokenizer_qwen2_style/tokenizer.json"));
  Random random(5);
  std::vector<std::string> texts;
  for (int i = 0; i < 200; ++i) texts.push_back(random_text(random, random.below(200)) + " the end of the line");
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  ThreadPool pool(4);
  const auto ids = tokenizer.encode_batch(views, pool);
  for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(ids[i], tokenizer.encode(texts[i]));
}

// More different words than the cache holds.
TEST(Tokenizer, TheCacheForgetsWithoutHarm) {
  const Tokenizer tokenizer = Tokenizer::load(fixture("tokenizer_reference/gpt2_style.json"));
  std::string text;
  for (int i = 0; i < 40000; ++i) {
    text += " w";
    for (int rest = i; rest > 0; rest /= 26) text += static_cast<char>('a' + rest % 26);
  }
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_EQ(tokenizer.encode(text), tokenizer.encode(text));
}

}  // namespace
}  // namespace sb
