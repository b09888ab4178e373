#!/usr/bin/env python3
"""How large the project is, in the figures that a redesign is judged by: lines, files, options, sub-commands, files of
every folder, and the longest functions.

usage: count-lines.py [--commit C]     of the files that git has here, or of a commit
       count-lines.py --self-test

A function's lines are counted as tests/check_includes.py counts them."""

import argparse
import collections
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from check_includes import functions  # noqa: E402

PROGRAM = {".h", ".cpp", ".cu", ".cuh", ".py", ".sh"}
COMPILED = {".h", ".cpp", ".cu", ".cuh"}
PARTS = ("src", "tests", "bench", "fuzz", "python", "scripts", "studies", "examples")
MOST_FUNCTIONS = 20


def files(tree):
    """{path in the tree: text} of the program's files: those that git has, in a checkout."""
    if (tree / ".git").exists():
        listed = subprocess.run(["git", "-C", tree, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
        paths = [pathlib.PurePath(name) for name in listed.split("\0") if name]
    else:
        paths = sorted(path.relative_to(tree) for path in tree.rglob("*"))
    return {path: (tree / path).read_text(encoding="utf-8", errors="replace")
            for path in paths if (path.suffix in PROGRAM or path.suffix == ".md") and (tree / path).is_file()}


def is_within(path, part):
    return path.parts[0] == part


def sizes(texts):
    """Files and lines of every part, and of every module of src."""
    rows = []
    for part in PARTS:
        own = {path: text for path, text in texts.items() if is_within(path, part) and path.suffix in PROGRAM}
        if own:
            rows.append((part, own))
        if part == "src":
            for module in sorted({path.parts[1] for path in own if len(path.parts) > 2}):
                rows.append((f"  src/{module}", {path: text for path, text in own.items() if path.parts[1] == module}))
    rows.append(("docs (words)", {path: text for path, text in texts.items() if path.suffix == ".md"}))
    return [(name, len(own), sum(len(text.split()) if "words" in name else text.count("\n") for text in own.values()))
            for name, own in rows]


def interface(texts):
    """Options and sub-commands, read from where they are made (a test holds docs/configuration.md to the program)."""
    configuration = texts.get(pathlib.PurePath("docs/configuration.md"), "")
    command_line = "".join(text for path, text in texts.items() if path.parts[:2] == ("src", "cli"))
    return {
        "options of run.yaml": len(re.findall(r"^\| `[a-z0-9_.]+` \| .*\|.*\|.*\|$", configuration, re.MULTILINE)),
        "options of the command line": len(re.findall(r"\badd_(?:option|flag)\w*\(", command_line)),
        "sub-commands": len(re.findall(r"\badd_subcommand\(", command_line)),
    }


def folders(texts):
    """Files of every folder of the program, the fullest first."""
    count = collections.Counter(str(path.parent) for path in texts if path.suffix in PROGRAM)
    return sorted(count.items(), key=lambda item: (-item[1], item[0]))


def longest_functions(texts):
    found = [(end - begin + 1, f"{path}:{begin}") for path, text in texts.items()
             if path.parts[0] == "src" and path.suffix in COMPILED for begin, end in functions(text)]
    return sorted(found, key=lambda item: (-item[0], item[1]))[:MOST_FUNCTIONS]


def report(tree):
    texts = files(tree)
    print(f"{'part':<28} {'files':>6} {'lines':>8}")
    for name, count, lines in sizes(texts):
        print(f"{name:<28} {count:>6} {lines:>8}")
    print()
    for name, count in interface(texts).items():
        print(f"{name:<28} {count:>6}")
    print("\nfolders, by files")
    for name, count in folders(texts):
        print(f"{count:>6} {name}")
    print("\nlongest functions of src, in lines (kernels are in .cu and .cuh)")
    for lines, place in longest_functions(texts):
        print(f"{lines:>6} {place}")


def of_commit(commit):
    """Counts the files of a commit, unpacked elsewhere."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        report(pathlib.Path(folder))


def self_test():
    path = pathlib.PurePath
    body = "  f();\n" * 3
    texts = {path("src/cli/a.cpp"): 'app.add_subcommand("a"); b->add_option("--x"); b->add_flag("-y");\n',
             path("src/core/b/b.cpp"): f"void g() {{\n{body}}}\nvoid h() {{\n{body}{body}}}\n",
             path("src/core/b/b.h"): "#pragma once\n", path("tests/c.py"): "a\nb\n",
             path("docs/configuration.md"): "| option | value | default | meaning |\n| `a.b` | x | `1` | y |\n`c.d`\n"}
    assert sizes(texts) == [("src", 3, 15), ("  src/cli", 1, 1), ("  src/core", 2, 14), ("tests", 1, 2),
                            ("docs (words)", 1, 19)], sizes(texts)
    assert list(interface(texts).values()) == [1, 2, 1], interface(texts)
    assert folders(texts) == [("src/core/b", 2), ("src/cli", 1), ("tests", 1)], folders(texts)
    assert longest_functions(texts) == [(8, "src/core/b/b.cpp:6"), (5, "src/core/b/b.cpp:1")], longest_functions(texts)
    print("count-lines: counts what it should")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--commit")
    mode.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        self_test()
    elif arguments.commit:
        of_commit(arguments.commit)
    else:
        report(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
