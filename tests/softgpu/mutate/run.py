"""Runs the tests that come to a mutant's site until one finds it."""

import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from . import build

# Preset and order of each, those that find most for their time first.
CONFIGURATIONS = {
    "plain": ("softgpu", {}),
    "reverse": ("softgpu", {"SOFTGPU_ORDER": "reverse", "SOFTGPU_COPIES": "random:1", "SOFTGPU_STREAMS": "random:1"}),
    "random": ("softgpu", {"SOFTGPU_ORDER": "random:1", "SOFTGPU_COPIES": "random:2", "SOFTGPU_STREAMS": "random:2"}),
    "eager": ("softgpu", {"SOFTGPU_ORDER": "random:2", "SOFTGPU_COPIES": "eager", "SOFTGPU_STREAMS": "random:3"}),
    "asan": ("softgpu-asan", {}),
    "tsan": ("softgpu-tsan", {"TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0"}),
}
MARKS = ((r"ERROR: AddressSanitizer[^\n]*", "AddressSanitizer"), (r"runtime error:[^\n]*", "UBSan"),
         (r"WARNING: ThreadSanitizer[^\n]*", "thread sanitizer"), (r"softgpu: [^\n]*", "the device's checks"))


def suites(test: dict) -> list[dict]:
    """A GoogleTest program is run suite by suite: a mutant's tests are then few."""
    filters = [a for a in test["command"] if a.startswith("--gtest_filter=")]
    environment = {**os.environ, **test["environment"]}
    try:
        listed = subprocess.run([test["command"][0], *filters, "--gtest_list_tests"], capture_output=True, text=True,
                                timeout=60, env=environment, cwd=test["folder"])
    except subprocess.TimeoutExpired:
        return [test]
    names: dict[str, list[str]] = {}
    suite = ""
    for line in listed.stdout.splitlines():
        line = line.split("#")[0].rstrip()
        if re.fullmatch(r"[\w/]+\.", line):
            suite = line
        elif suite and re.fullmatch(r"  \S+", line):
            names.setdefault(suite, []).append(line.strip())
    if listed.returncode != 0 or not names:
        return [test]
    return [{**test, "name": f"{test['name']}:{suite[:-1]}",
             "command": [test["command"][0], "--gtest_fail_fast",
                         "--gtest_filter=" + ":".join(suite + case for case in cases)],
             "environment": {k: v for k, v in test["environment"].items() if not k.startswith("GTEST_")}}
            for suite, cases in names.items()]


def once(test: dict, environment: dict, seconds: float) -> tuple[bool, str, float]:
    begun = time.monotonic()
    process = subprocess.Popen(["nice", "-n", "10", *test["command"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               cwd=test["folder"], env={**os.environ, **test["environment"], **environment},
                               start_new_session=True)
    try:
        output = process.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return False, "it does not end", time.monotonic() - begun
    return process.returncode == 0, output, time.monotonic() - begun


def who(output: str) -> tuple[str, str]:
    if output == "it does not end":
        return "does not end", ""
    for pattern, name in MARKS:
        if m := re.search(pattern, output):
            return name, m.group(0)[:160]
    failed = re.search(r"\[  FAILED  \] [^\n]*|FAILED[^\n]*|[^\n]*(?:terminate called|what\(\):)[^\n]*", output)
    return "results", failed.group(0)[:160] if failed else output[-160:]


class Baseline:
    """What passes without a mutant, in which time, and to which sites it comes."""

    def __init__(self, tree: Path, configuration: str):
        preset, self.environment = CONFIGURATIONS[configuration]
        folder = build.compile_preset(tree, preset)
        self.tests = [unit for test in build.tests_of(folder) for unit in suites(test)]
        self.configuration = configuration
        self.file = tree.parent / f"baseline-{configuration}.json"
        state = hashlib.sha256()
        for command in sorted({test["command"][0] for test in self.tests}):
            state.update(Path(command).read_bytes())
        self.state = state.hexdigest()
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.of = kept["of"] if kept.get("state") == self.state else {}

    def look(self, test: dict) -> dict:
        if test["name"] not in self.of:
            with tempfile.TemporaryDirectory() as folder:
                reached = Path(folder) / "reached"
                passed, output, seconds = once(test, {**self.environment, "MUTANT_REACHED": str(reached)}, 1800)
                sites = sorted({int(line) for line in reached.read_text().split()}) if reached.exists() else []
            if not passed:
                print(f"  {test['name']} fails without a mutant ({self.configuration}), so that it says nothing: "
                      f"{who(output)[1]}", flush=True)
            self.of[test["name"]] = {"passed": passed, "seconds": round(seconds, 2), "sites": sites}
            self.file.write_text(json.dumps({"state": self.state, "of": self.of}))
        return self.of[test["name"]]

    def that_reach(self, number: int) -> list[tuple[dict, float]]:
        looks = [(test, self.look(test)) for test in self.tests]
        return sorted(((test, look["seconds"]) for test, look in looks if look["passed"] and number in look["sites"]),
                      key=lambda pair: pair[1])


def fails(test: dict, environment: dict, mutant: dict, seconds: float):
    """The output and time of a test that fails with the mutant and passes without it; nothing where it passes."""
    for patience in (5 * seconds + 20, 15 * seconds + 120):
        passed, output, took = once(test, {**environment, **mutant}, patience)
        if passed:
            return None
        if who(output)[0] != "does not end":
            break
    if not once(test, environment, 15 * seconds + 120)[0]:
        print(f"  {test['name']} failed without the mutant, too: it says nothing", flush=True)
        return None
    return output, took


def one(number: int, baselines: dict[str, Baseline]) -> dict:
    """Who finds this mutant, and in which configuration."""
    reached = False
    for name, baseline in baselines.items():
        for test, seconds in baseline.that_reach(number):
            reached = True
            if failed := fails(test, baseline.environment, {"MUTANT": str(number)}, seconds):
                by, words = who(failed[0])
                return {"found": by, "in": name, "test": test["name"], "words": words, "seconds": round(failed[1], 1)}
    return {"found": "", "reached": reached}


def still_holds(row: dict | None, states: dict[str, str]) -> bool:
    """Whether a row of the log was made with these programs: by all of them, where nobody found the mutant."""
    if row is None:
        return False
    needed = [row["in"]] if row["found"] else states
    return all(row["states"].get(name) == states.get(name) is not None for name in needed)


def mutants(tree: Path, chosen, configurations: list[str], log, minutes: float | None) -> list:
    baselines = {name: Baseline(tree, name) for name in configurations}
    states = {name: baseline.state for name, baseline in baselines.items()}
    begun, results = time.monotonic(), []
    for number, site in chosen:
        known = log.get(site.key)
        if not still_holds(known, states):
            if minutes and time.monotonic() - begun > 60 * minutes:
                print("the time is over; the same command goes on from here")
                break
            known = {"key": site.key, "file": site.file, "line": site.line, "kind": site.kind, "says": site.says,
                     "states": states, **one(number, baselines)}
            log.add(known)
        found = f"found by {known['found']} ({known['in']})" if known["found"] else "SURVIVES"
        print(f"{number:4d} {site.kind:8s} {site.file}:{site.line}: {site.says}: {found}", flush=True)
        results.append((site, known))
    return results


def patches(root: Path, files: list[Path], configurations: list[str]) -> int:
    """Changes of one's own, each in a copy of its own sources."""
    lived = 0
    tree = root / "build" / "mutants" / "patched"
    build.copy_of(root, tree)
    plain = {name: Baseline(tree, name) for name in configurations}
    for baseline in plain.values():
        for test in baseline.tests:
            baseline.look(test)
    for file in files:
        build.copy_of(root, tree)
        subprocess.run(["git", "apply", "--directory", str(tree.relative_to(root)), str(file)], cwd=root, check=True)
        found = ""
        try:
            for name in configurations:
                build.compile_preset(tree, CONFIGURATIONS[name][0])
                for test in sorted(plain[name].tests, key=lambda t: plain[name].look(t)["seconds"]):
                    look = plain[name].look(test)
                    if not look["passed"]:
                        continue
                    passed, output, _ = once(test, CONFIGURATIONS[name][1], 15 * look["seconds"] + 120)
                    if not passed:
                        found = f"found by {who(output)[0]} ({name}, {test['name']}): {who(output)[1]}"
                        break
                if found:
                    break
        finally:
            subprocess.run(["git", "apply", "-R", "--directory", str(tree.relative_to(root)), str(file)], cwd=root, check=True)
        print(f"{file.name}: {found or 'SURVIVES'}", flush=True)
        lived += not found
    return 1 if lived else 0
