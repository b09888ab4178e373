#!/usr/bin/env python3
"""Fails where the documentation, or an example in the program's help, names what is not there: a link, a file of this
repository, a key of the configuration, a command of the program or one of its options.

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


def mistakes(text, folder, program):
    """Pairs of a line and what it names in vain; `folder` is where the page's links start."""
    for match in re.finditer(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in match.group(1) and not (folder / match.group(1)).exists():
            yield text.count("\n", 0, match.start()) + 1, match.group(1)
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


def self_test(program):
    wrong = """[a page](missing.md)
`src/core/missing.cpp`, `build/dev/bench/train/bench_missing`
`train.mispelt`, `sparsebalance tarin run.yaml`
    sparsebalance train run.yaml --rank 2
"""
    right = """[a page](docs/data.md)
`src/core/errors.h`, `src/core/*.h`, `build/dev/bench/train/bench_engine`, `build/cpu/src/cli/sparsebalance`
`train.max_steps`, `sparsebalance data stats`, `sparsebalance eval TASK --model DIR`
    sparsebalance train run.yaml --ranks 2 --set train.max_steps=3
"""
    found = [name for _, name in mistakes(wrong, ROOT, program)]
    expected = ["missing.md", "src/core/missing.cpp", "bench/train/bench_missing", "train.mispelt", "tarin",
                "train --rank"]
    assert found == expected, found
    assert not list(mistakes(right, ROOT, program)), list(mistakes(right, ROOT, program))


def main():
    program = Program(sys.argv[1])
    if sys.argv[2:] == ["--self-test"]:
        self_test(program)
        return 0
    found = []
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    for page in pages:
        for line, name in mistakes(page.read_text(encoding="utf-8"), page.parent, program):
            found.append(f"{page.relative_to(ROOT)}:{line}: there is no {name}")
    for path in program.paths():
        for _, name in mistakes(program.footer(*path), ROOT, program):
            found.append(f"sparsebalance {' '.join(path)} --help: there is no {name}")
    print("\n".join(found) or f"documentation: {len(pages)} pages name only what is there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
