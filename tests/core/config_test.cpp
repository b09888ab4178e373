#include "core/config/config.h"

#include <gtest/gtest.h>

#include <fstream>

#include "core/errors.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

enum class Color { red, green };

// A table with one option of every kind, and a section that may be absent.
struct Fixture {
  bool flag = true;
  int small = 3;
  int64_t large = 5;
  uint64_t seed = 1;
  double number = 0.5;
  float single = 0.1f;
  double first = 0.9, second = 0.95;
  std::vector<int64_t> layers{1, 2};
  std::string text = "auto";
  std::filesystem::path path;
  Color color = Color::green;
  bool has_extra = false;
  int64_t extra = 7;
  OptionTable table;

  Fixture() {
    table.integer("top", &large, 0, OptionTable::kAny, "at the top");
    table.section("a", "The a section.");
    table.flag("a.flag", &flag, "a flag");
    table.integer("a.small", &small, 1, 10, "a small number");
    table.integer("a.seed", &seed, 0, OptionTable::kAny, "a seed");
    table.number("a.number", &number, 0.0, 1.0, "a number");
    table.number("a.single", &single, 0.0, 1.0, "a float");
    table.numbers("a.pair", {&first, &second}, 0.0, 1.0, "a pair");
    table.integers("a.layers", &layers, 0, 100, "a list");
    table.text("a.text", &text, "some | text");
    table.path("a.path", &path, "a path");
    table.choice<Color>("a.color", &color, {{"red", Color::red}, {"green", Color::green}}, "a color");
    table.section("a.extra", "Optional.", &has_extra);
    table.integer("a.extra.count", &extra, 0, 100, "a count");
  }

  std::string load_error(const std::string& yaml) {
    return message_of([&] { table.load(yaml, "f.yaml"); });
  }
  std::string set_error(const std::string& assignment) {
    return message_of([&] { table.set(assignment); });
  }
};

TEST(Config, FillsEveryKindOfOption) {
  Fixture f;
  f.table.load(
      "top: 12\n"
      "a:\n"
      "  flag: off\n"
      "  small: 10\n"
      "  seed: 9223372036854775807\n"
      "  number: 1.0e-5\n"
      "  single: 0.25\n"
      "  pair: [0.5, 1]\n"
      "  layers: [0, 100, 7]\n"
      "  text: 'a: b # c'\n"
      "  path: /x/y z\n"
      "  color: red\n"
      "  extra: {count: 9}\n",
      "f.yaml");
  EXPECT_EQ(f.large, 12);
  EXPECT_FALSE(f.flag);
  EXPECT_EQ(f.small, 10);
  EXPECT_EQ(f.seed, 9223372036854775807u);
  EXPECT_EQ(f.number, 1e-5);
  EXPECT_EQ(f.single, 0.25f);
  EXPECT_EQ(f.first, 0.5);
  EXPECT_EQ(f.second, 1.0);
  EXPECT_EQ(f.layers, (std::vector<int64_t>{0, 100, 7}));
  EXPECT_EQ(f.text, "a: b # c");
  EXPECT_EQ(f.path, "/x/y z");
  EXPECT_EQ(f.color, Color::red);
  EXPECT_TRUE(f.has_extra);
  EXPECT_EQ(f.extra, 9);
}

TEST(Config, KeepsDefaultsOfWhatIsNotMentioned) {
  for (const char* yaml : {"", "# nothing\n", "---\n", "a:\n", "a: {}\n", "a:\n  # small: 4\n"}) {
    Fixture f;
    f.table.load(yaml, "f.yaml");
    EXPECT_EQ(f.small, 3) << yaml;
    EXPECT_FALSE(f.has_extra) << yaml;
    EXPECT_FALSE(f.table.given("a.small")) << yaml;
  }
}

TEST(Config, BooleanWords) {
  for (const char* word : {"true", "True", "on", "yes", "ON"}) {
    Fixture f;
    f.flag = false;
    f.table.set(std::string("a.flag=") + word);
    EXPECT_TRUE(f.flag) << word;
  }
  for (const char* word : {"false", "FALSE", "off", "no"}) {
    Fixture f;
    f.table.set(std::string("a.flag=") + word);
    EXPECT_FALSE(f.flag) << word;
  }
  for (const char* word : {"1", "0", "maybe", "'true'", "[true]", ""}) {
    Fixture f;
    EXPECT_NE(f.set_error(std::string("a.flag=") + word), kNothingThrown) << word;
  }
}

TEST(Config, OptionalSectionCountsWhenMentioned) {
  Fixture f;
  f.table.load("a: {extra: {}}\n", "f.yaml");
  EXPECT_TRUE(f.has_extra);
  EXPECT_EQ(f.extra, 7);
  f.table.set("a.extra=null");
  EXPECT_FALSE(f.has_extra);
  f.table.set("a.extra.count=4");
  EXPECT_TRUE(f.has_extra);
  EXPECT_EQ(f.extra, 4);
}

TEST(Config, UnknownKeysNameTheLineAndTheNearestKey) {
  Fixture f;
  EXPECT_EQ(f.load_error("top: 1\na:\n  smal: 3\n"), "f.yaml:3: unknown key 'a.smal'; did you mean 'a.small'?");
  EXPECT_EQ(f.load_error("\n\nsmall: 3\n"), "f.yaml:3: unknown key 'small'; did you mean 'a.small'?");
  EXPECT_EQ(f.load_error("a: {esed: 3}\n"), "f.yaml:1: unknown key 'a.esed'; did you mean 'a.seed'?");
  EXPECT_EQ(f.load_error("layesr: [3]\n"), "f.yaml:1: unknown key 'layesr'; did you mean 'a.layers'?");
  EXPECT_EQ(f.load_error("a:\n  extra:\n    cuont: 2\n"),
            "f.yaml:3: unknown key 'a.extra.cuont'; did you mean 'a.extra.count'?");
  // Neither the section that it is in nor another of its short words.
  EXPECT_EQ(f.load_error("a: {extra: {q: 2}}\n"), "f.yaml:1: unknown key 'a.extra.q'; 'a.extra' has count");
  EXPECT_EQ(f.load_error("a: {extra: {smal: 2}}\n"), "f.yaml:1: unknown key 'a.extra.smal'; 'a.extra' has count");
  EXPECT_EQ(f.load_error("zzzzzzzzzzzz: 3\n"),
            "f.yaml:1: unknown key 'zzzzzzzzzzzz'; docs/configuration.md lists the known ones");
  EXPECT_EQ(f.set_error("a={small:3}"), "--set: unknown key 'a.small:3'; YAML needs a space after the ':' of a key");
  // A key below something that is no section.
  EXPECT_EQ(f.set_error("a.small.x=3").substr(0, 31), "--set: unknown key 'a.small.x';");
  EXPECT_EQ(f.set_error("a.smalll=3"), "--set: unknown key 'a.smalll'; did you mean 'a.small'?");
}

TEST(Config, WrongTypesAreRefusedWithTheLine) {
  Fixture f;
  EXPECT_EQ(f.load_error("a:\n  small: many\n"), "f.yaml:2: a.small: expected an integer, found 'many'");
  EXPECT_EQ(f.load_error("a:\n  small: '3'\n"), "f.yaml:2: a.small: expected an integer, found the text \"3\"");
  EXPECT_EQ(f.load_error("a: {small: 3.0}\n"), "f.yaml:1: a.small: expected an integer, found '3.0'");
  EXPECT_EQ(f.load_error("a: {small: 3x}\n"), "f.yaml:1: a.small: expected an integer, found '3x'");
  EXPECT_EQ(f.load_error("a:\n  small:\n    - 3\n"), "f.yaml:2: a.small: expected an integer, found a list");
  EXPECT_EQ(f.load_error("a:\n  small: {x: 1}\n"), "f.yaml:2: a.small: expected an integer, found a section");
  EXPECT_EQ(f.load_error("a:\n  number: fast\n"), "f.yaml:2: a.number: expected a number, found 'fast'");
  EXPECT_EQ(f.load_error("a: {number: .nan}\n"), "f.yaml:1: a.number: expected a number, found '.nan'");
  EXPECT_EQ(f.load_error("a: {number: inf}\n"), "f.yaml:1: a.number: expected a number, found 'inf'");
  EXPECT_EQ(f.load_error("a: {number: 1e999}\n"), "f.yaml:1: a.number: expected a number, found '1e999'");
  EXPECT_EQ(f.load_error("a: {pair: 3}\n"), "f.yaml:1: a.pair: expected a list like [a, b], found '3'");
  EXPECT_EQ(f.load_error("a: {pair: [1]}\n"), "f.yaml:1: a.pair: expected 2 numbers, found 1");
  EXPECT_EQ(f.load_error("a:\n  pair:\n    - 0.5\n    - x\n"), "f.yaml:4: a.pair[1]: expected a number, found 'x'");
  EXPECT_EQ(f.load_error("a: {text: [x]}\n"), "f.yaml:1: a.text: expected text, found a list");
  EXPECT_EQ(f.load_error("a: 3\n"), "f.yaml:1: a: is a section; expected options below it, found '3'");
  EXPECT_EQ(f.load_error("a: [3]\n"), "f.yaml:1: a: is a section; expected options below it, found a list");
  EXPECT_EQ(f.load_error("a:\n  small:\n"), "f.yaml:2: a.small: has no value; give one or remove the key");
  EXPECT_EQ(f.load_error("a: {small: ~}\n"), "f.yaml:1: a.small: has no value; give one or remove the key");
}

TEST(Config, ValuesOutOfRangeAreRefused) {
  Fixture f;
  EXPECT_EQ(f.load_error("a: {small: 0}\n"), "f.yaml:1: a.small: must be at least 1, found 0");
  EXPECT_EQ(f.load_error("a: {small: 11}\n"), "f.yaml:1: a.small: must be at most 10, found 11");
  EXPECT_EQ(f.load_error("a: {number: -0.1}\n"), "f.yaml:1: a.number: must be at least 0, found -0.1");
  EXPECT_EQ(f.load_error("a: {number: 1.1}\n"), "f.yaml:1: a.number: must be at most 1, found 1.1");
  EXPECT_EQ(f.load_error("a: {layers: [1, 101]}\n"), "f.yaml:1: a.layers[1]: must be at most 100, found 101");
  EXPECT_EQ(f.load_error("a: {seed: 9223372036854775808}\n"),
            "f.yaml:1: a.seed: '9223372036854775808' does not fit in 64 bits");
  EXPECT_EQ(f.load_error("a: {color: pink}\n"), "f.yaml:1: a.color: unknown value 'pink'; choose one of red, green");
  EXPECT_EQ(f.layers, (std::vector<int64_t>{1, 2})) << "a refused list leaves the value alone";
}

TEST(Config, RangeOfANarrowVariableIsCut) {
  int value = 1;
  OptionTable table;
  table.integer("n", &value, 0, OptionTable::kAny, "");
  EXPECT_EQ(message_of([&] { table.set("n=2147483648"); }), "--set: n: must be at most 2147483647, found 2147483648");
}

TEST(Config, DuplicateKeysAreRefused) {
  Fixture f;
  EXPECT_EQ(f.load_error("a:\n  small: 3\n  seed: 1\n  small: 4\n"),
            "f.yaml:4: key 'small' appears a second time (first at f.yaml:2)");
  EXPECT_EQ(f.load_error("a:\n  small: 3\na:\n  seed: 3\n"),
            "f.yaml:3: key 'a' appears a second time (first at f.yaml:1)");
  EXPECT_EQ(f.load_error("a: {small: 3}\na.small: 4\n"),
            "f.yaml:2: key 'a.small' appears a second time (first at f.yaml:1)");
  EXPECT_EQ(f.load_error("a: {small: 3}\na.seed: 4\n"), kNothingThrown);
  EXPECT_EQ(f.set_error("a.small=4"), kNothingThrown);
  EXPECT_EQ(f.set_error("a.small=5"), kNothingThrown);
}

TEST(Config, HostileYamlIsRefused) {
  Fixture f;
  EXPECT_EQ(f.load_error("a: &x\n  small: 3\n"),
            "f.yaml:1: YAML anchors (&name) are not supported here; write the value out");
  EXPECT_NE(f.load_error("top: &x 3\na: {small: *x}\n").find("anchors"), std::string::npos);
  EXPECT_NE(f.load_error("top: *x\n"), kNothingThrown);
  // The bomb that doubles at each level: stopped at its first anchor.
  std::string bomb = "x0: &x0 [1, 1]\n";
  for (int i = 1; i < 64; ++i) bomb += fmt::format("x{0}: &x{0} [*x{1}, *x{1}]\n", i, i - 1);
  EXPECT_EQ(f.load_error(bomb), "f.yaml:1: YAML anchors (&name) are not supported here; write the value out");
  EXPECT_NE(f.load_error("top: !!int 3\n").find("tags"), std::string::npos);
  EXPECT_NE(f.load_error("top: !evil 3\n").find("tags"), std::string::npos);
  EXPECT_NE(f.load_error("? [a, b]\n: 3\n").find("a key must be a plain word"), std::string::npos);
  EXPECT_NE(f.load_error("? {a: b}\n: 3\n").find("a key must be a plain word"), std::string::npos);
  EXPECT_NE(f.load_error("~: 3\n").find("a key must be a plain word"), std::string::npos);
  EXPECT_EQ(f.load_error("top: 3\n---\ntop: 4\n"), "f.yaml: contains more than one YAML document; keep one");
  EXPECT_NE(f.load_error("- 3\n").find("expected sections"), std::string::npos);
  EXPECT_NE(f.load_error("hello\n").find("expected sections"), std::string::npos);
  EXPECT_EQ(f.load_error(std::string("top: 3\0\n", 8)), "f.yaml: contains a zero byte; a configuration is a text file");
}

TEST(Config, DeepNestingIsRefused) {
  Fixture f;
  for (const int depth : {17, 400, 5000, 200000}) {
    const std::string yaml = "top: " + std::string(static_cast<size_t>(depth), '[');
    EXPECT_NE(f.load_error(yaml), kNothingThrown) << depth;
    std::string block = "top: ";
    for (int i = 0; i < depth; ++i) block += "- ";
    EXPECT_NE(f.load_error(block), kNothingThrown) << depth;
  }
  EXPECT_EQ(f.load_error("top: [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]\n"), "f.yaml:1: nested deeper than 16 levels");
}

TEST(Config, TooManyKeysAreRefused) {
  Fixture f;
  std::string yaml;
  for (int i = 0; i < 100000; ++i) yaml += fmt::format("k{}: 1\n", i);
  EXPECT_EQ(f.load_error(yaml), "f.yaml:1001: more than 1000 keys in one section");
}

TEST(Config, SyntaxErrorsNameTheLine) {
  Fixture f;
  EXPECT_EQ(f.load_error("a:\n  small: 3\n bad: [1\n").substr(0, 8), "f.yaml:3");
  EXPECT_EQ(f.load_error("a:\n\tsmall: 3\n").substr(0, 7), "f.yaml:");
  EXPECT_EQ(f.load_error("a:\n  small: [3,\n").substr(0, 7), "f.yaml:");
  EXPECT_NE(f.load_error("a:\n\tsmall: 3\n").find("f.yaml:2: "), std::string::npos);
  EXPECT_NE(f.load_error("a:\n\tsmall: 3\n").find("YAML does not allow tabs"), std::string::npos);
  EXPECT_EQ(f.load_error("a: [\n").find("tabs"), std::string::npos);
}

TEST(Config, OversizedInputIsRefused) {
  Fixture f;
  EXPECT_NE(f.load_error(std::string(kMaxConfigBytes + 1, '#')).find("too many for a configuration"),
            std::string::npos);
  f.table.load(std::string(kMaxConfigBytes, '#'), "f.yaml");

  const auto path = std::filesystem::path(testing::TempDir()) / "config_test_huge.yaml";
  std::ofstream(path) << std::string(kMaxConfigBytes + 1, '#');
  EXPECT_NE(message_of([&] { read_config_file(path); }).find("is this the right file?"), std::string::npos);
  std::ofstream(path) << "top: 3\n";
  EXPECT_EQ(read_config_file(path), "top: 3\n");
  std::filesystem::remove(path);
  EXPECT_NE(message_of([&] { read_config_file(path); }).find("cannot be opened"), std::string::npos);
  EXPECT_NE(message_of([&] { read_config_file(testing::TempDir()); }).find("it is a directory"), std::string::npos);
}

TEST(Config, OverridesWinOverTheFileAndLaterOverEarlier) {
  Fixture f;
  f.table.load("a: {small: 2, pair: [0.1, 0.2]}\n", "f.yaml");
  f.table.set("a.small=4");
  f.table.set("a.small=5");
  f.table.set("a.pair=[0.3, 0.4]");
  f.table.set("a={number: 0.125, text: x=y}");
  f.table.set("a.path=k=v");
  EXPECT_EQ(f.small, 5);
  EXPECT_EQ(f.second, 0.4);
  EXPECT_EQ(f.number, 0.125);
  EXPECT_EQ(f.text, "x=y");
  EXPECT_EQ(f.path, "k=v");
  EXPECT_NE(f.set_error("a.small").find("expected section.option=value"), std::string::npos);
  EXPECT_NE(f.set_error("=3").find("expected section.option=value"), std::string::npos);
  EXPECT_EQ(f.set_error("a.small="), "--set: a.small: has no value; give one; the default is --set 'a.small=3'");
  EXPECT_EQ(f.set_error("a={path: null}"), "--set: a.path: has no value; give one; the default is --set 'a.path=\"\"'");
  f.table.set("a.path=\"\"");
  EXPECT_EQ(f.path, "");
  EXPECT_EQ(f.set_error("a.small=[1"), "--set: end of sequence flow not found");
  EXPECT_EQ(f.set_error("a.small=3\nb: 4"), "--set: '3\nb: 4' is not a single value");
}

TEST(Config, LabelsSayWhereAValueCameFrom) {
  Fixture f;
  f.table.load("a:\n  small: 2\n", "f.yaml");
  f.table.set("a.seed=4");
  EXPECT_EQ(f.table.label("a.small"), "f.yaml:2: a.small");
  EXPECT_EQ(f.table.label("a.seed"), "--set: a.seed");
  EXPECT_EQ(f.table.label("a.number"), "a.number");
  EXPECT_TRUE(f.table.given("a.seed"));
  EXPECT_FALSE(f.table.given("a.number"));
  EXPECT_THROW(f.table.given("a.nothing"), InternalError);
}

TEST(Config, PrintedYamlLoadsToTheSameValues) {
  const std::vector<std::string> texts{"",          "auto", "true",     "3",         "a: b",  "#x",      "'q'",
                                       "\"d\"",     "\\",   "~",        "null",      " lead", "trail ",  "a\nb",
                                       "tab\there", "…ü",   "-",        "[x]",       "a,b}",  "@handle", "%percent",
                                       "...",       "---",  "\x01\x7f", "a/b.c-d_e", "1e5",   "&a"};
  for (const std::string& text : texts) {
    Fixture f;
    f.text = text;
    f.path = text;
    f.number = 0.1 + 0.2;
    f.single = 1.0f / 3.0f;
    f.large = OptionTable::kAny;
    f.layers = {};
    f.has_extra = true;
    f.extra = 42;
    f.flag = false;
    const std::string printed = f.table.yaml();
    Fixture g;
    g.table.load(printed, "printed");
    EXPECT_EQ(g.text, text) << printed;
    EXPECT_EQ(g.path, text);
    EXPECT_EQ(g.number, 0.1 + 0.2);
    EXPECT_EQ(g.single, 1.0f / 3.0f);
    EXPECT_EQ(g.large, OptionTable::kAny);
    EXPECT_TRUE(g.layers.empty());
    EXPECT_TRUE(g.has_extra);
    EXPECT_EQ(g.extra, 42);
    EXPECT_FALSE(g.flag);
    EXPECT_EQ(g.table.yaml(), printed);
  }
}

TEST(Config, AbsentSectionsAreNotPrinted) {
  Fixture f;
  EXPECT_EQ(f.table.yaml().find("extra"), std::string::npos);
  f.has_extra = true;
  EXPECT_NE(f.table.yaml().find("  extra:\n    count: 7\n"), std::string::npos);
}

TEST(Config, MarkdownListsEveryOptionWithRangeAndDefault) {
  Fixture f;
  f.small = 9;  // a value, not the default
  const std::string page = f.table.markdown();
  EXPECT_NE(page.find("| `a.small` | integer, 1 to 10 | `3` | a small number |\n"), std::string::npos) << page;
  EXPECT_NE(page.find("| `top` | integer, at least 0 | `5` | at the top |\n"), std::string::npos);
  EXPECT_NE(page.find("| `a.color` | red, green | `green` | a color |\n"), std::string::npos);
  EXPECT_NE(page.find("| `a.text` | string | `auto` | some \\| text |\n"), std::string::npos);
  EXPECT_NE(page.find("| `a.path` | path | none | a path |\n"), std::string::npos);
  EXPECT_NE(page.find("\n## a.extra\n\nOptional.\n"), std::string::npos);
  EXPECT_EQ(page.find("gone"), std::string::npos);
}

TEST(Config, DeclarationMistakesAreInternalErrors) {
  Fixture f;
  EXPECT_THROW(f.table.flag("a.flag", &f.flag, ""), InternalError);
  EXPECT_THROW(f.table.flag("nowhere.flag", &f.flag, ""), InternalError);
  EXPECT_THROW(f.table.section("a", ""), InternalError);
}

TEST(Config, NearestWord) {
  const std::vector<std::string> words{"learning_rate", "weight_decay", "betas", "eps"};
  EXPECT_EQ(nearest_word("lerning_rate", words), "learning_rate");
  EXPECT_EQ(nearest_word("learnign_rate", words), "learning_rate");
  EXPECT_EQ(nearest_word("beta", words), "betas");
  EXPECT_EQ(nearest_word("esp", words), "eps");
  EXPECT_EQ(nearest_word("momentum", words), "");
  EXPECT_EQ(nearest_word(std::string(100000, 'x'), words), "");
  EXPECT_EQ(nearest_word("x", {}), "");
}

}  // namespace
}  // namespace sb
