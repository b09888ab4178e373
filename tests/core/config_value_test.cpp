#include "core/config/config_value.h"

#include <gtest/gtest.h>

#include "core/config/config.h"
#include "core/words.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

using Kind = ConfigValue::Kind;

ConfigValue value(const std::string& yaml) {
  return parse_config_value(yaml, "--set");
}

TEST(ConfigValue, KindsOfValues) {
  const std::tuple<const char*, Kind, bool, const char*> cases[] = {
      {"3", Kind::scalar, false, "'3'"},
      {"'3'", Kind::scalar, true, "the text \"3\""},
      {"\"\"", Kind::scalar, true, "the text \"\""},
      {"", Kind::null, false, "nothing"},
      {"~", Kind::null, false, "nothing"},
      {"null", Kind::null, false, "nothing"},
      {"NULL", Kind::null, false, "nothing"},
      {"nULL", Kind::scalar, false, "'nULL'"},
      {"'null'", Kind::scalar, true, "the text \"null\""},
      {"[]", Kind::list, false, "a list"},
      {"[1, 2]", Kind::list, false, "a list"},
      {"{}", Kind::map, false, "a section"},
      {"{a: 1}", Kind::map, false, "a section"},
      {"# only a remark", Kind::null, false, "nothing"},
  };
  for (const auto& [yaml, kind, quoted, described] : cases) {
    const ConfigValue read = value(yaml);
    EXPECT_EQ(read.kind, kind) << yaml;
    EXPECT_EQ(read.describe(), described) << yaml;
    EXPECT_EQ(read.where, "--set") << yaml;
    if (kind == Kind::scalar) {
      EXPECT_EQ(read.quoted, quoted) << yaml;
    }
  }
  EXPECT_EQ(value(std::string(61, 'x')).describe(), "'" + std::string(60, 'x') + "...'");
  EXPECT_EQ(value(std::string(60, 'x')).describe(), "'" + std::string(60, 'x') + "'");
}

TEST(ConfigValue, EverythingKnowsItsLine) {
  const ConfigValue root = parse_config("a: 1\nb:\n  - x\n  - y\n\nc:\n  d: {e: 2}\n  f:\n", "run.yaml");
  ASSERT_EQ(root.entries.size(), 3u);
  EXPECT_EQ(root.entries[0].value.where, "run.yaml:1");
  const ConfigValue& list = root.entries[1].value;
  EXPECT_EQ(list.where, "run.yaml:2") << "where its key stands";
  ASSERT_EQ(list.items.size(), 2u);
  EXPECT_EQ(list.items[1].where, "run.yaml:4");
  const ConfigValue& section = root.entries[2].value;
  EXPECT_EQ(section.entries[0].value.entries[0].value.where, "run.yaml:7");
  EXPECT_EQ(section.entries[1].key, "f");
  EXPECT_EQ(section.entries[1].value.kind, Kind::null);
  EXPECT_EQ(section.entries[1].value.where, "run.yaml:8");
}

TEST(ConfigValue, WholeNumbersAtTheirBorders) {
  const std::pair<const char*, int64_t> good[] = {
      {"0", 0}, {"-0", 0}, {"007", 7}, {"-9223372036854775808", INT64_MIN}, {"9223372036854775807", INT64_MAX}};
  for (const auto& [text, number] : good)
    EXPECT_EQ(config_integer(value(text), "n", INT64_MIN, INT64_MAX), number) << text;
  for (const char* text : {"+1", "1_000", "0x10", "1e3", "1.", "--1", "1 2", "one", "''", "[]", "~"})
    EXPECT_NE(message_of([&] { config_integer(value(text), "n", INT64_MIN, INT64_MAX); }).find("expected an integer"),
              std::string::npos)
        << text;
  for (const char* text : {"9223372036854775808", "-9223372036854775809", "99999999999999999999999999"})
    EXPECT_NE(
        message_of([&] { config_integer(value(text), "n", INT64_MIN, INT64_MAX); }).find("does not fit in 64 bits"),
        std::string::npos)
        << text;
  EXPECT_EQ(config_integer(value("5"), "n", 5, 5), 5);
  EXPECT_EQ(message_of([] { config_integer(value("6"), "n", 5, 5); }), "--set: n: must be at most 5, found 6");
  EXPECT_EQ(message_of([] { config_integer(value("4"), "n", 5, 5); }), "--set: n: must be at least 5, found 4");
}

TEST(ConfigValue, NumbersInEveryWriting) {
  const std::pair<const char*, double> good[] = {{"0", 0.0},       {"-2.5", -2.5},        {".5", 0.5},
                                                 {"5.", 5.0},      {"1e-3", 0.001},       {"1E3", 1000},
                                                 {"1e300", 1e300}, {"4.9e-324", 4.9e-324}};
  for (const auto& [text, number] : good) EXPECT_EQ(config_number(value(text), "n", -1e308, 1e308), number) << text;
  for (const char* text :
       {"+1", "1,5", "1e", "e1", "nan", "-inf", "infinity", "1e400", "'1'", "[1]", "{}", "~", "0x1p3"})
    EXPECT_NE(message_of([&] { config_number(value(text), "n", -1e308, 1e308); }).find("expected a number"),
              std::string::npos)
        << text;
}

// Whatever a text holds (but bytes that are no UTF-8), printed and read again it is the same.
TEST(ConfigValue, TextsSurviveTheWayThroughYaml) {
  std::vector<std::string> texts = {"a...b",
                                    "...",
                                    "a:b",
                                    "a: b",
                                    "a #b",
                                    "a\r\nb",
                                    "\"",
                                    "\\x41",
                                    "\xC2\x85",
                                    "\xE2\x80\xA8",
                                    "x\xEF\xBB\xBFy",
                                    "\xF0\x9F\x98\x80",
                                    "=",
                                    "/",
                                    ".",
                                    "_",
                                    "yes",
                                    std::string("a\0b", 3),
                                    std::string("\0", 1),
                                    std::string(5000, ' ')};
  for (int code = 1; code < 0x80; ++code) {
    texts.push_back(std::string(1, static_cast<char>(code)));
    texts.push_back({'a', static_cast<char>(code), 'b'});
  }
  for (const std::string& text : texts) {
    const std::string printed = yaml_text(text);
    EXPECT_EQ(printed.find('\n'), std::string::npos) << "on one line";
    EXPECT_EQ(config_text(value(printed), "n"), text) << printed;
    const ConfigValue root = parse_config("k: " + printed + "\nl: 2\n", "run.yaml");
    ASSERT_EQ(root.entries.size(), 2u) << printed;
    EXPECT_EQ(config_text(root.entries[0].value, "k"), text) << printed;
  }
  for (const char* plain : {"auto", "/data/x.y-z_1", "a+b=c", "_x", "./a"}) EXPECT_EQ(yaml_text(plain), plain);
}

TEST(ConfigValue, ListsAndTextsOfTheWrongKind) {
  EXPECT_EQ(message_of([] { config_list(value("{a: 1}"), "n"); }),
            "--set: n: expected a list like [a, b], found a section");
  EXPECT_EQ(message_of([] { config_text(value("{a: 1}"), "n"); }), "--set: n: expected text, found a section");
  EXPECT_EQ(message_of([] { config_text(value("~"), "n"); }), "--set: n: expected text, found nothing");
  EXPECT_EQ(message_of([] { config_bool(value("[true]"), "n"); }), "--set: n: expected true or false, found a list");
  EXPECT_EQ(config_list(value("[a, [b], {c: d}, ~]"), "n").size(), 4u);
}

enum class Fruit { apple, pear, plum };
constexpr Word<Fruit> kFruits[] = {{"apple", Fruit::apple}, {"pear", Fruit::pear}};

TEST(Words, ThereAndBack) {
  for (const auto& [word, fruit] : kFruits) {
    EXPECT_EQ(word_of(kFruits, fruit), word);
    EXPECT_EQ(value_of(kFruits, word, "fruit"), fruit);
  }
  EXPECT_EQ(message_of<InternalError>([] { word_of(kFruits, Fruit::plum); }), "value 2 has no word");
  for (const char* unknown : {"", "Apple", "apple ", "app", "plum"})
    EXPECT_EQ(message_of([&] { value_of(kFruits, unknown, "a fruit"); }),
              std::string("a fruit: unknown value ") + unknown + "; choose from apple, pear");
}

TEST(Words, OptionsOfWordsAndThoseThatAreGone) {
  Fruit fruit = Fruit::pear;
  OptionTable table;
  table.word("fruit", &fruit, kFruits, "a fruit");
  table.refuse_word("fruit", "cherry", "is no longer there; take apple");
  table.set("fruit=apple");
  EXPECT_EQ(fruit, Fruit::apple);
  EXPECT_EQ(message_of([&] { table.set("fruit=cherry"); }), "--set: fruit: cherry is no longer there; take apple");
  EXPECT_EQ(message_of([&] { table.set("fruit=plum"); }),
            "--set: fruit: unknown value 'plum'; choose one of apple, pear");
  EXPECT_EQ(message_of([&] { table.set("fruit=[cherry]"); }), "--set: fruit: expected text, found a list");
  EXPECT_EQ(fruit, Fruit::apple);
  EXPECT_THROW(table.refuse_word("vegetable", "leek", ""), InternalError);
  fruit = Fruit::plum;
  EXPECT_THROW(table.yaml(), InternalError) << "a value without a word cannot be printed";
}

}  // namespace
}  // namespace sb
