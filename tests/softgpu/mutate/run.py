"""Runs the cases that come to a mutant's site until one finds it."""

import collections
import concurrent.futures
import glob
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from . import build, cases

# Preset and order of each. Survivors of one go on to the next; "longer" are all other cases of a file (cases.py).
CONFIGURATIONS = {
    "plain": ("softgpu", {}),
    "reverse": ("softgpu", {"SOFTGPU_ORDER": "reverse", "SOFTGPU_COPIES": "eager", "SOFTGPU_STREAMS": "random:1"}),
    "random": ("softgpu", {"SOFTGPU_ORDER": "random:1", "SOFTGPU_COPIES": "random:2", "SOFTGPU_STREAMS": "random:2"}),
    "longer": ("softgpu", {}),
    "asan": ("softgpu-asan", {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}),
}
SLOWER = {"asan": 4.0}  # than the plain order, at most
# Processor seconds for one mutant in one configuration, after which no further case is begun.
BUDGET = {"plain": 6.0, "reverse": 15.0, "random": 15.0, "longer": 60.0, "asan": 60.0}
QUIET = 40.0  # seconds in which no thread of a run wants the processor: it is blocked

RULES = ((r"ERROR: AddressSanitizer[^\n]*", "sanitizer"), (r"runtime error:[^\n]*", "sanitizer"),
         (r"softgpu: [^\n]*deadlock[^\n]*", "deadlock"), (r"softgpu: (?!a software)[^\n]*", "rule"))


def activity(session: int) -> tuple[int, bool]:
    """The processor time that all threads of a run have taken, and whether one of them wants more."""
    ticks, wants = 0, False
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = Path(path).read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            ticks += int(fields[11]) + int(fields[12])
            for task in glob.glob(path.replace("stat", "task/*/stat")):
                wants |= Path(task).read_text().rpartition(")")[2].split()[0] in "RD"
        except OSError:  # it has ended
            continue
    return ticks, wants


Run = collections.namedtuple("Run", "passed output seconds")


def once(case: cases.Case, tree: Path, folder: Path, environment: dict, limit: float) -> Run:
    """A run of at most `limit` seconds of processor time: whatever else the machine does, it is the same limit."""
    def limits():
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 3))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    own = {**cases.ENVIRONMENT.get(case.program, {}), **environment}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(case.command(folder), stdout=output, stderr=subprocess.STDOUT, cwd=tree,
                                   env={**os.environ, **own}, start_new_session=True, preexec_fn=limits)
        blocked = threading.Event()
        over = threading.Event()

        def watch():
            last, since = 0, time.monotonic()
            while not over.wait(5):
                now, wants = activity(process.pid)
                if now > last or wants:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > QUIET:
                    blocked.set()
                    os.killpg(process.pid, signal.SIGKILL)
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        over.set()
        watcher.join()
        output.seek(0)
        text = output.read().decode(errors="replace")
    seconds = usage.ru_utime + usage.ru_stime
    if blocked.is_set() or process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        text = "does not end" + (", blocked" if blocked.is_set() else "") + "\n" + text
    return Run(process.returncode == 0, text, seconds)


def who(output: str) -> tuple[str, str]:
    """What found a mutant, and in which words."""
    for pattern, name in RULES:
        if m := re.search(pattern, output):
            return name, m.group(0)[:160]
    if output.startswith("does not end"):
        return "time", output.split("\n")[0]
    failed = re.search(r"\[  FAILED  \] [^\n]*|[^\n]*FAILED[^\n]*|[^\n]*(?:terminate called|what\(\):)[^\n]*", output)
    return "results", failed.group(0)[:160] if failed else output[-160:]


class Baseline:
    """What passes without a mutant in the plain order, in which time, and to which instances of sites it comes."""

    def __init__(self, tree: Path, folder: Path):
        self.tree, self.folder = tree, folder
        self.file = tree / "build" / "baseline.json"
        self.programs = {}
        self.kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.lock = threading.Lock()
        self.looking: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)

    def _state(self, program: str) -> str:
        if program not in self.programs:
            path = self.folder / cases.PROGRAMS[program][0]
            self.programs[program] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return self.programs[program]

    def look(self, case: cases.Case) -> dict:
        with self.lock:
            mine = self.looking[str(case)]
        with mine:  # one worker looks, the others wait for it
            with self.lock:
                known = self.kept.get(str(case))
                state = self._state(case.program)
            return known if known and known["state"] == state else self._look(case, state)

    def _look(self, case: cases.Case, state: str) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            reached = Path(folder) / "reached"
            ran = once(case, self.tree, self.folder, {"MUTANT_REACHED": str(reached)}, 1800)
            sites: dict[str, list[str]] = {}
            for line in reached.read_text().splitlines() if reached.exists() else []:
                number, function = line.split(" ", 1)
                sites.setdefault(number, []).append(hashlib.sha256(function.encode()).hexdigest()[:8])
        if not ran.passed:
            print(f"  {case} fails without a mutant, so that it says nothing: {who(ran.output)[1]}", flush=True)
        look = {"state": state, "passed": ran.passed, "seconds": round(ran.seconds, 2), "sites": sites}
        with self.lock:
            self.kept[str(case)] = look
            temporary = self.file.with_suffix(".new")
            temporary.write_text(json.dumps(self.kept))
            temporary.replace(self.file)
        return look

    def that_reach(self, number: int, those: list[cases.Case]) -> list[tuple[cases.Case, float]]:
        """Of these cases, the quickest that come to every instance of the site, and then the others."""
        first = number % max(len(those), 1)  # so that workers do not wait for each other's looks
        looks = [(case, self.look(case)) for case in those[first:] + those[:first]]
        looks = sorted(((case, look) for case, look in looks if look["passed"] and str(number) in look["sites"]),
                       key=lambda pair: (pair[1]["seconds"], pair[0].name))
        needed, others, seen = [], [], set()
        for case, look in looks:
            instances = set(look["sites"][str(number)])
            (others if instances <= seen else needed).append((case, look["seconds"]))
            seen |= instances
        return needed + others


class Runner:
    def __init__(self, root: Path, tree: Path, configurations: list[str], programs: list[str]):
        self.root, self.tree, self.configurations = root, tree, configurations
        self.folders = {preset: build.compile_preset(tree, preset, programs)
                        for preset in sorted({"softgpu"} | {CONFIGURATIONS[name][0] for name in configurations})}
        self.baseline = Baseline(tree, self.folders["softgpu"])
        self.choice = cases.Choice(tree, self.folders["softgpu"])
        self.passes: dict[tuple[str, cases.Case], bool] = {}

    def run(self, case: cases.Case, configuration: str, seconds: float, mutant: dict) -> Run:
        preset, environment = CONFIGURATIONS[configuration]
        limit = 5 * seconds * SLOWER.get(configuration, 1.5) + 4
        return once(case, self.tree, self.folders[preset], {**environment, **mutant}, limit)

    def passes_unchanged(self, case: cases.Case, configuration: str, seconds: float) -> bool:
        if CONFIGURATIONS[configuration] == CONFIGURATIONS["plain"]:
            return True  # Baseline has seen it
        key = configuration, case
        if key not in self.passes:
            self.passes[key] = self.run(case, configuration, seconds, {}).passed
            if not self.passes[key]:
                print(f"  {case} fails without a mutant ({configuration}): it says nothing", flush=True)
        return self.passes[key]

    def configuration(self, site, name: str, ran_before: list[str]) -> dict:
        """Who finds this mutant in one configuration."""
        spent, ran_now, reached = 0.0, [], False
        for case, seconds in self.baseline.that_reach(site.number, self.choice.of_file(site.file, name == "longer")):
            reached = True
            if name == "longer" and str(case) in ran_before:
                continue
            if ran_now and spent + seconds > BUDGET[name]:
                break
            ran = self.run(case, name, seconds, {"MUTANT": str(site.number)})
            spent += ran.seconds
            ran_now.append(str(case))
            if not ran.passed and self.passes_unchanged(case, name, seconds):
                by, words = who(ran.output)
                return {"found": by, "in": name, "test": str(case), "words": words, "cpu": spent, "ran": ran_now}
        return {"found": "", "reached": reached, "cpu": spent, "ran": ran_now}

    def mutant(self, site, known: dict | None, names: list[str]) -> dict:
        row = known or {"key": site.key, "file": site.file, "line": site.line, "kind": site.kind, "says": site.says,
                        "source": source_state(self.root, site.file), "survived": [], "cpu": 0.0, "runs": 0, "ran": [],
                        "reached": False}
        row = dict(row)
        for name in names:
            result = self.configuration(site, name, row["ran"])
            row["cpu"], row["runs"] = round(row["cpu"] + result["cpu"], 2), row["runs"] + len(result["ran"])
            row["ran"] = row["ran"] + (result["ran"] if name == "plain" else [])
            row["reached"] = row["reached"] or result.get("reached", True)
            if result["found"]:
                return {**row, **{k: result[k] for k in ("found", "in", "test", "words")}}
            row["survived"] = row["survived"] + [name]
        return {**row, "found": ""}


def source_state(root: Path, file: str) -> str:
    return hashlib.sha256((root / file).read_bytes()).hexdigest()[:12]


def mutants(root: Path, tree: Path, chosen, configurations: list[str], log, minutes: float | None, workers: int) -> list:
    programs = cases.programs_of({site.file for site in chosen}, "longer" in configurations)
    runner = Runner(root, tree, configurations, programs)
    begun, results = time.monotonic(), []

    def todo(site) -> list[str]:
        known = log.get(site.key)
        if known and known["source"] != source_state(root, site.file):
            known = None
        if known and known["found"]:
            return []
        return [name for name in configurations if not known or name not in known["survived"]]

    def one(site):
        names = todo(site)
        if not names or (minutes and time.monotonic() - begun > 60 * minutes):
            return
        known = log.get(site.key)
        if known and known["source"] != source_state(root, site.file):
            known = None
        row = runner.mutant(site, known, names)
        log.add(row)
        found = f"found by {row['found']} ({row['in']})" if row["found"] else "SURVIVES"
        print(f"{site.kind:8s} {site.file}:{site.line}: {site.says}: {found}, {row['cpu']} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, random.Random(0).sample(chosen, len(chosen))))  # those of one file are not neighbours
    for site in chosen:
        if (row := log.get(site.key)) and not todo(site):
            results.append((site, row))
    if len(results) < len(chosen):
        print(f"{len(chosen) - len(results)} are left: the same command goes on from here")
    return results


def patches(root: Path, files: list[Path], configurations: list[str]) -> int:
    """Changes of one's own, each in a copy of its own sources: the cases of the files that it changes."""
    lived = 0
    tree = root / "build" / "mutants" / "patched"
    for file in files:
        touched = [name for name in re.findall(r"^\+\+\+ b/(\S+)", file.read_text(), re.M) if name.startswith("src/")]
        programs = cases.programs_of(touched, "longer" in configurations)
        build.copy_of(root, tree)
        plain = Runner(root, tree, configurations, programs)
        those = [case for name in touched for case in plain.choice.of_file(name, "longer" in configurations)]
        looks = {case: plain.baseline.look(case) for case in dict.fromkeys(those)}
        runs = [(name, case, look["seconds"]) for name in configurations for case, look in looks.items()
                if look["passed"] and plain.passes_unchanged(case, name, look["seconds"])]
        in_tree = ["git", "apply", "--directory", str(tree.relative_to(root))]
        subprocess.run([*in_tree, str(file)], cwd=root, check=True)
        found = ""
        try:
            changed = Runner(root, tree, configurations, programs)
            for name, case, seconds in runs:
                ran = changed.run(case, name, seconds, {})
                if not ran.passed:
                    found = f"found by {who(ran.output)[0]} ({name}, {case}): {who(ran.output)[1]}"
                    break
        finally:
            subprocess.run([*in_tree, "-R", str(file)], cwd=root, check=True)
        print(f"{file.name}: {found or 'SURVIVES'}", flush=True)
        lived += not found
    return 1 if lived else 0
