"""What a record was made by: program, kernels and compiler, without which bits mean nothing."""

import ast
import hashlib
import os
import pathlib
import re
import subprocess

from results.case import Program, RecordError

# What settles which case is recorded under a name, and how.
CASES = ("case", "commands", "memory_plans", "settings", "tensors", "trainings")
OPTION = re.compile(r"^\| `([a-z0-9_.]+)` \|(?:.*\|){3}$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s{0,4}(--[a-z][a-z-]*)", re.MULTILINE)


def asked(path, *words):
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RecordError(f"{path} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def opened(path):
    """The program, with what it can be told."""
    path = pathlib.Path(path).resolve()
    if not os.access(path, os.X_OK):
        raise RecordError(f"{path}: no program; build one: cmake --preset dev && cmake --build --preset dev")
    arguments = {command: frozenset(ARGUMENT.findall(asked(path, *command.split(), "--help")))
                 for command in ("simulate", "bench attention")}
    return Program(path, frozenset(OPTION.findall(asked(path, "config", "--markdown"))), arguments)


def kernels(path):
    """Which instruction sets compute: ours, and those of OpenBLAS, whose order of sums also follows its environment."""
    text = asked(path, "doctor")
    own = re.search(r"^processor .*?, (\S+) kernels$", text, re.MULTILINE)
    blas = re.search(r"^matmuls\s+(OpenBLAS for \w+|.*?)[ ,]", text, re.MULTILINE)
    if own is None or blas is None:
        raise RecordError(f"{path} doctor does not name the kernels it uses:\n{text}")
    forced = {name: value for name, value in sorted(os.environ.items())
              if name.startswith("OPENBLAS_") or name == "SB_CPU_ISA"}
    return {"kernels": own[1], "matmuls": blas[1], **forced}


def cached(path, name):
    """A value of the CMake cache of the folder that the program was built in."""
    for folder in path.parents:
        cache = folder / "CMakeCache.txt"
        if cache.exists():
            found = re.search(rf"^{name}:\w+=(.*)$", cache.read_text(encoding="utf-8"), re.MULTILINE)
            return found[1] if found else ""
    return ""


def compiler(path):
    name = cached(path, "CMAKE_CXX_COMPILER")
    if not name:
        return "unknown"
    flags = " ".join(filter(None, (cached(path, "CMAKE_CXX_FLAGS"), cached(path, "CMAKE_BUILD_TYPE"))))
    return f"{asked(name, '--version').splitlines()[0]}; {flags}"


def commit(path):
    """The commit that the program's sources are at, where the program was built after it."""
    source = cached(path, "CMAKE_HOME_DIRECTORY") or "/"
    questions = (["describe", "--always", "--dirty", "--abbrev=7"], ["show", "--no-patch", "--format=%ct"])
    name, made = (subprocess.run(["git", "-C", source, *words], capture_output=True, text=True, check=False)
                  for words in questions)
    if name.returncode != 0 or made.returncode != 0 or path.stat().st_mtime < int(made.stdout):
        return ""
    return name.stdout.strip()


def file_hash(paths):
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def meaning(path):
    """What a Python file does, whatever its comments and lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                body[0] = ast.Pass()
    return ast.dump(tree)


def header(program):
    """Two records compare where `must agree` and `cases by` are equal."""
    folder = pathlib.Path(__file__).resolve().parent
    made = "".join(meaning(folder / f"{name}.py") for name in CASES)
    return {
        "commit": commit(program.path) or "unknown",
        "must agree": {**kernels(program.path), "compiler": compiler(program.path)},
        "program": file_hash([program.path, *program.path.parents[2].glob("src/comm/*.so")]),
        "cases by": hashlib.sha256(made.encode()).hexdigest()[:16],
    }


def settings_case(program, options, arguments):
    """Options that no case writes, so that a default applies, and options that cases write but the program lacks."""
    found = {"run.yaml, not written": sorted(program.options - options),
             "run.yaml, not known": sorted(options - program.options)}
    for command, written in arguments.items():
        found[f"{command}, not written"] = sorted(program.arguments[command] - written)
        found[f"{command}, not known"] = sorted(written - program.arguments[command])
    return found
