#!/usr/bin/env python3
"""Fails where the documentation, or an example in the program's help, names what is not there: a link, a heading, a file
of this repository, a key of the configuration, a command of the program or one of its options. Also fails where a figure
of README.md is not on the page that it links to.

usage: check_docs.py PROGRAM | check_docs.py PROGRAM --self-test (shows that it can fail)
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = "src|python|tests|bench|scripts|docs|examples|fuzz|cmake|.ci"


def code_of(text):
    """Code spans and lines of code blocks, each with the number of its line."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield number, line
        else:
            for span in re.findall(r"`([^`]+)`", line):
                yield number, span


def file_exists(path):
    """Of this repository; * and the like stand for several, a program may be named like its source."""
    pattern = re.sub(r"\{[^}]*\}|<[^>]*>|…", "*", path)
    if "*" in pattern or "?" in pattern:
        return any(ROOT.glob(pattern))
    return any((ROOT / (path + ending)).exists() for ending in ("", ".cpp", ".cu"))


class Program:
    """What the program says of itself."""

    def __init__(self, path):
        self.path = path
        self.known, self.footers = {}, {}

    def output(self, *words):
        if words not in self.known:
            run = subprocess.run([self.path, *words], capture_output=True, text=True, check=False)
            self.known[words] = run.stdout if run.returncode == 0 else ""
            if words[-1] == "--help":  # an example is no evidence for what it names
                self.known[words], _, self.footers[words] = self.known[words].partition("\nExample: ")
        return self.known[words]

    def commands(self, *path):
        _, _, listed = self.output(*path, "--help").partition("Subcommands:")
        return re.findall(r"^  (\w+)", listed, re.M)

    def help(self, *path):
        """Of a command, of those it contains and of the program."""
        below = "".join(self.output(*path, command, "--help") for command in self.commands(*path))
        return self.output(*path, "--help") + below + self.output("--help")

    def paths(self, *path):
        """Of every command, those within others too."""
        for command in self.commands(*path):
            yield (*path, command)
            yield from self.paths(*path, command)

    def footer(self, *path):
        """A command's example and the pages it names, as a page would write them."""
        self.output(*path, "--help")
        return "".join(f"    {line}\n" for line in self.footers[(*path, "--help")].splitlines())

    def keys(self):
        return set(re.findall(r"^\| `([a-z_.]+)`", self.output("config", "--markdown"), re.M))

    def unknown_words(self, line):
        """Of a command line, what the program would not understand."""
        words = line.split()
        path = ()
        while len(path) < len(words) and words[len(path)] in self.commands(*path):
            path += (words[len(path)],)
        rest = words[len(path) :]
        if not path and rest and re.fullmatch(r"[a-z]+", rest[0]):
            yield rest[0]
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(rest)):
            if not re.search(r"(?<![\w-])%s(?![\w-])" % option, self.help(*path)):
                yield f"{' '.join(path)} {option}"


def anchors(text):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def mistakes(text, folder, program):
    """Pairs of a line and what it names in vain; `folder` is where the page's links start."""
    for match in re.finditer(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        page, anchor = match.groups()
        if "://" in page:
            continue
        line = text.count("\n", 0, match.start()) + 1
        if page and not (folder / page).exists():
            yield line, page
        elif anchor and anchor not in anchors((folder / page).read_text(encoding="utf-8") if page else text):
            yield line, f"{page}#{anchor}"
    keys = program.keys()
    sections = "|".join({key.split(".")[0] for key in keys if "." in key})
    for line, code in code_of(text):
        for path in re.findall(rf"(?<![\w./-])(?:build/\w+/(?=bench/))?((?:{FOLDERS})/[\w.{{}}<>*?,/…-]+)", code):
            if not file_exists(path.rstrip(".,")):
                yield line, path
        for key in re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z_.]*[a-z_](?![\w/(*-])", code):
            if key not in keys and not any(known.startswith(key + ".") for known in keys):
                if key.split(".")[-1] not in ("py", "cpp", "h", "sh", "yaml", "json", "jsonl", "safetensors", "index"):
                    yield line, key
        for command in re.findall(r"(?<![\w/.-])(?<!import )sparsebalance ([^|#;&]*)", code):
            for word in program.unknown_words(command):
                yield line, word


# Sections of README.md in which nothing may be claimed without a page to look it up on.
CLAIMS = ("What you gain", "What it costs")


def figures(text):
    """Numbers that stand alone (not those of Qwen2.5-3B, fp8 or 128K), without sign and separators."""
    found = re.findall(r"(?<![\w.,/-])(?:[-+−])?(\d[\d,]*(?:\.\d+)?)(?!\.?\w)", text)
    return {number.replace(",", "") for number in found}


def statements(text):
    """Of a page: the heading above it, the line it starts at and the text of every table row, list item and paragraph."""
    heading, start, lines = "", 0, []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        mark = re.match(r"#+ (.*)|(\||[-*>] |\d+\. )|$", line)
        if mark and lines:
            yield heading, start, " ".join(lines)
            lines = []
        if mark and mark.group(1):
            heading = mark.group(1)
        elif line:
            start = start if lines else number
            lines.append(line.strip())


def unfounded(text, read):
    """Pairs of a line and what is wrong with its figures; `read` gives the text of a page."""
    fenced = re.sub(r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.M | re.S)
    for heading, line, statement in statements(fenced):
        pages = re.findall(r"\]\((docs/[\w/-]+\.md)", statement)
        claimed = figures(re.sub(r"`[^`]*`|!\[[^]]*\]|\]\([^)]*\)", " ", statement))
        if pages:
            known = set().union(*(figures(read(page)) for page in pages))
            for figure in sorted(claimed - known):
                yield line, f"{figure} is not on {', '.join(dict.fromkeys(pages))}"
        elif heading in CLAIMS and claimed:
            yield line, f"{', '.join(sorted(claimed))}: no page is linked"


def self_test_of_figures():
    page = "| 3B | 18,554 | 3.930 | +0.077 | 11.14 |\nTwice 1.16 to 1.67, at 625 / 554."
    readme = """# Title
Fast: [18,554 tokens/s](docs/results/a.md), 1.16 to 1.67
times as fast, at 625 / 554.
## What you gain
| Qwen2.5-3B, 128K | [3.930](docs/results/a.md) |
| Qwen2.5-3B | [1.14](docs/results/a.md) |
- Costs [-0.077](docs/results/a.md), 3.93
- By 7 %.
```
sparsebalance simulate --steps 99
```
## Other
Builds in 13 minutes.
"""
    found = list(unfounded(readme, lambda path: page))
    assert found == [(6, "1.14 is not on docs/results/a.md"), (7, "3.93 is not on docs/results/a.md"),
                     (8, "7: no page is linked")], found  # fmt: skip
    # The real page, with one of its figures changed.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    read = lambda path: (ROOT / path).read_text(encoding="utf-8")
    figure = re.search(r"\[([\d,]+\.?\d*)[^]]*\]\(docs/results/", text)
    planted = text[: figure.start(1)] + "987,654" + text[figure.end(1) :]
    assert [wrong.split()[0] for _, wrong in unfounded(planted, read)] == ["987654"], list(unfounded(planted, read))


def self_test(program):
    wrong = """[a page](missing.md), [a heading](docs/data.md#missing)
`src/core/missing.cpp`, `build/dev/bench/train/bench_missing`
`train.mispelt`, `sparsebalance tarin run.yaml`
    sparsebalance train run.yaml --rank 2
"""
    right = """[a page](docs/data.md), [a heading](docs/data.md#origin-and-ids)
`src/core/errors.h`, `src/core/*.h`, `build/dev/bench/train/bench_engine`, `build/cpu/src/cli/sparsebalance`
`train.max_steps`, `sparsebalance data stats`, `sparsebalance eval TASK --model DIR`
    sparsebalance train run.yaml --ranks 2 --set train.max_steps=3
"""
    found = [name for _, name in mistakes(wrong, ROOT, program)]
    expected = ["missing.md", "docs/data.md#missing", "src/core/missing.cpp", "bench/train/bench_missing", "train.mispelt", "tarin",
                "train --rank"]
    assert found == expected, found
    assert not list(mistakes(right, ROOT, program)), list(mistakes(right, ROOT, program))


def main():
    program = Program(sys.argv[1])
    if sys.argv[2:] == ["--self-test"]:
        self_test(program)
        self_test_of_figures()
        return 0
    found = []
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    for page in pages:
        for line, name in mistakes(page.read_text(encoding="utf-8"), page.parent, program):
            found.append(f"{page.relative_to(ROOT)}:{line}: there is no {name}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for line, wrong in unfounded(readme, lambda path: (ROOT / path).read_text(encoding="utf-8")):
        found.append(f"README.md:{line}: {wrong}")
    for path in program.paths():
        for _, name in mistakes(program.footer(*path), ROOT, program):
            found.append(f"sparsebalance {' '.join(path)} --help: there is no {name}")
    print("\n".join(found) or f"documentation: {len(pages)} pages name only what is there, README.md only figures that are")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
