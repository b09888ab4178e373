#!/usr/bin/env python3
"""Fails when an include points against the direction of the modules (docs/architecture.md), when folders of any depth
include each other in a circle, when a folder is crowded, when a function outside kernels is longer than anybody follows,
or when a header drags in a library that only source files may know. `--self-test` shows that it can fail."""

import pathlib
import re
import sys
import tempfile

# What each module of src/ may include besides itself.
ALLOWED = {
    "core": set(),
    "device": {"core"},
    "ops": {"core", "device"},
    "attention": {"core", "device", "ops"},
    "model": {"core", "device", "ops", "attention", "comm"},
    "data": {"core"},
    "plan": {"core"},
    "comm": {"core", "device"},
    "parallel": {"core", "device", "ops", "attention", "model", "plan", "comm"},
    "run": {"core", "device", "attention", "model", "data", "plan", "comm", "parallel"},
    "train": {"core", "device", "ops", "attention", "model", "data", "plan", "comm", "parallel", "run"},
    "report": {"core", "plan", "run"},
    "eval": {"core", "device", "ops", "attention", "model", "data"},
    "cli": {"core", "device", "ops", "attention", "model", "data", "plan", "comm", "parallel", "run", "train", "report",
            "eval"},
}
# A folder holds no more files than a reader takes in at a glance.
MOST_FILES = 25
# Lines of a function, from its name to its closing brace; kernels (.cu, .cuh) keep their loops in one place.
MOST_LINES = 100
# Slow to compile, or present in some builds only: no header of ours may include them, except those made for it.
SOURCES_ONLY = ("nlohmann/", "spdlog/", "yaml-cpp/", "CLI/", "mpi.h", "nccl.h", "cuda", "cublas", "cblas.h", "pcre2.h")
EXCEPTIONS = [
    (re.compile(r"_json\.h$"), re.compile(r"^nlohmann/json_fwd\.hpp$")),
    (re.compile(r"cuda[^/]*\.h$"), re.compile(r"^(cuda|cublas)")),
    (re.compile(r"(mpi|nccl)[^/]*\.h$"), re.compile(r"^(mpi|nccl)\.h$")),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
# What may hold a brace that opens nothing, and what opens a block that is no function.
TEXT = re.compile(r'''R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|//[^\n]*|/\*(?:.|\n)*?\*/''')
NO_FUNCTION = re.compile(r"(if|for|while|switch|do|else|try|catch|namespace|class|struct|enum|union|extern)\b")


def circles(folders):
    """Folders that include each other, directly or through others: {folder: {folder it includes: where}}."""
    found, done = [], set()

    def visit(folder, path):
        if folder in path:
            around = path[path.index(folder) :] + [folder]
            places = [folders[a][b] for a, b in zip(around, around[1:])]
            found.append(f"folders in a circle: {' -> '.join(around)} ({'; '.join(places)})")
            return
        if folder in done:
            return
        for other in sorted(folders.get(folder, {})):
            visit(other, path + [folder])
        done.add(folder)

    for folder in sorted(folders):
        visit(folder, [])
    return found


def crowded(source_dir):
    found = []
    for folder in sorted(p for p in source_dir.rglob("*") if p.is_dir()):
        files = sum(1 for p in folder.iterdir() if p.is_file() and p.name != "CMakeLists.txt")
        if files > MOST_FILES:
            found.append(f"{folder}: {files} files side by side, more than {MOST_FILES}: group them")
    return found


def functions(text):
    """First and last line of every function; a lambda belongs to the function it stands in."""
    code = TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)
    found, open_blocks, head, begin, line = [], [], "", 1, 1  # head: since the last brace or semicolon
    for character in code:
        if character == "{":
            words = re.sub(r"^\s*#[^\n]*$|^\s*(public|private|protected)\s*:", "", head, flags=re.MULTILINE)
            words = re.sub(r"^template\s*<[^{}]*?>\s*(?=\w)", "", words.strip())
            inside = any(start is not None for start in open_blocks)
            is_function = "(" in words and not NO_FUNCTION.match(words) and not words.endswith("=")
            open_blocks.append(begin if is_function and not inside else None)
            head = ""
        elif character == "}":
            start = open_blocks.pop() if open_blocks else None
            if start is not None:
                found.append((start, line))
            head = ""
        elif character == ";":
            head = ""
        else:
            if not head.strip() and not character.isspace():
                head, begin = "", line
            head += character
        line += character == "\n"
    return found


def long_functions(path, text):
    return [f"{path}:{begin}: a function of {end - begin + 1} lines, more than {MOST_LINES}: name its parts"
            for begin, end in functions(text) if end - begin + 1 > MOST_LINES]


def violations(source_dir):
    found = crowded(source_dir)
    folders = {}
    for path in sorted(source_dir.rglob("*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        module = path.relative_to(source_dir).parts[0]
        if module not in ALLOWED:
            found.append(f"{path}: '{module}' is no module; add it to tests/check_includes.py and docs/architecture.md")
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix in {".h", ".cuh"} and "#pragma once" not in text:
            found.append(f"{path}: a header without #pragma once")
        if path.suffix in {".h", ".cpp"}:
            found += long_functions(path, text)
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None:
                continue
            where, (kind, name) = f"{path}:{number}", match.groups()
            if kind == '"':
                other = name.split("/")[0]
                if not (source_dir / name).is_file():
                    found.append(f'{where}: "{name}" is not the full path of a file under src/')
                elif other != module and other not in ALLOWED[module]:
                    found.append(f'{where}: {module} may not include "{name}"')
                else:
                    own, included = path.relative_to(source_dir).parent.as_posix(), name.rpartition("/")[0]
                    if own != included:
                        folders.setdefault(own, {}).setdefault(included, f'{where} "{name}"')
            elif path.suffix == ".h" and name.startswith(SOURCES_ONLY):
                if any(header.search(path.name) and library.match(name) for header, library in EXCEPTIONS):
                    continue
                found.append(f"{where}: <{name}> belongs into source files, not into a header")
    return found + circles(folders)


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        source_dir = pathlib.Path(folder)

        def write(name, text):
            path = source_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

        write("core/a.h", "#pragma once\n#include <vector>\n")
        write("ops/b.h", '#pragma once\n#include "core/a.h"\n')
        write("ops/b_json.h", "#pragma once\n#include <nlohmann/json_fwd.hpp>\n")
        write("ops/b.cpp", '#include "ops/b.h"\n#include <nlohmann/json.hpp>\n')
        assert violations(source_dir) == [], violations(source_dir)
        for name, text, part in [
            ("core/up.cpp", '#include "ops/b.h"\n', "core may not include"),
            ("data/side.cpp", '  #  include "ops/b.h"\n', "data may not include"),
            ("core/short.cpp", '#include "a.h"\n', "not the full path"),
            ("core/json.h", "#pragma once\n#include <nlohmann/json.hpp>\n", "belongs into source files"),
            ("core/c_json.h", "#pragma once\n#include <nlohmann/json.hpp>\n", "belongs into source files"),
            ("core/guard.h", "int a;\n", "#pragma once"),
            ("utils/c.h", "#pragma once\n", "is no module"),
        ]:
            write(name, text)
            found = violations(source_dir)
            assert len(found) == 1 and part in found[0], (name, found)
            (source_dir / name).unlink()
        body = 'const char* s = "{";  // {\n' + "  f();\n" * (MOST_LINES - 4)
        for name, text in [("core/f.cpp", f"namespace sb {{\nint g(\n    int a) {{\n{body}}}\n}}\n"),
                           ("core/g.cpp", f"struct A {{\n  template <typename T>\n  void g() {{\n  {body}}}\n}};\n"),
                           ("core/k.cu", f"void g() {{\n{body * 2}}}\n")]:
            write(name, text)
            assert violations(source_dir) == [], violations(source_dir)
            if name.endswith(".cpp"):
                write(name, text.replace("  f();\n", "  f();\n\n\n", 1))
                found = violations(source_dir)
                assert len(found) == 1 and "a function of 10" in found[0], found
            (source_dir / name).unlink()
        write("core/deep/low.h", '#pragma once\n#include "core/a.h"\n')
        assert violations(source_dir) == [], violations(source_dir)
        write("core/a.h", '#pragma once\n#include "core/deep/low.h"\n')
        found = violations(source_dir)
        assert len(found) == 1 and "core -> core/deep -> core" in found[0], found
        write("core/a.h", "#pragma once\n")
        for i in range(MOST_FILES):
            write(f"ops/many/{i}.cpp", "")
        assert violations(source_dir) == [], violations(source_dir)
        write("ops/many/last.cpp", "")
        found = violations(source_dir)
        assert len(found) == 1 and "files side by side" in found[0], found
    print("check_includes: finds what it should")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return 0
    found = violations(pathlib.Path(__file__).resolve().parent.parent / "src")
    for line in found:
        print(line)
    print(f"include directions: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
