"""A copy of the sources with a switch at every site, built as the presets of the software device build."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from . import sites

TARGETS = ("ops_test", "attention_select_test", "attention_hopper_test", "attention_cuda_test", "cuda_ring_test",
           "device_test", "comm_device_test", "model_test", "eval_test", "cuda_training_test", "cuda_ranks_test")


def copy_of(root: Path, to: Path) -> Path:
    """The files that git knows or would know, each written only where it changed, so that little is compiled again."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                           capture_output=True, check=True, text=True).stdout.split("\0")
    kept = set()
    for name in filter(None, names):
        source, target = root / name, to / name
        if not source.is_file():
            continue
        kept.add(target)
        if not target.exists() or source.stat().st_mtime > target.stat().st_mtime:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
    for path in list(to.glob("src/**/*")) + list(to.glob("tests/**/*")):
        if path.is_file() and path not in kept:
            path.unlink()
    return to


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def mutated_tree(root: Path, numbered) -> Path:
    most = int(re.search(r"kMost = (\d+)", (root / "tests/softgpu/mutate/mutant.h").read_text()).group(1))
    if len(numbered) > most:
        raise SystemExit(f"mutant.h has room for {most} sites, there are {len(numbered)}: raise kMost")
    tree = copy_of(root, root / "build" / "mutants" / "tree")
    of_file: dict[str, list] = {}
    for number, site in numbered:
        of_file.setdefault(site.file, []).append((number, site))
    header = f'#include "{tree}/tests/softgpu/mutate/mutant.h"\n#line 1\n'
    for file, its in of_file.items():
        write_if_changed(tree / file, header + sites.with_switches((root / file).read_text(), its))
    return tree


def compile_preset(tree: Path, preset: str) -> Path:
    subprocess.run(["cmake", "--preset", preset], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", "--preset", preset, "--target", *TARGETS], cwd=tree, check=True)
    return tree / "build" / preset


def tests_of(folder: Path) -> list[dict]:
    """name, command and environment of every test with the label gpu."""
    answer = subprocess.run(["ctest", "--test-dir", str(folder), "-L", "gpu", "--show-only=json-v1"],
                            capture_output=True, check=True, text=True).stdout
    tests = []
    for test in json.loads(answer)["tests"]:
        command = test.get("command")
        if not command or not Path(command[0]).is_file() or Path(command[0]).name not in TARGETS:
            continue
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        environment = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", []))
        tests.append({"name": test["name"], "command": command, "environment": environment,
                      "folder": properties.get("WORKING_DIRECTORY", str(folder))})
    return tests
