#!/usr/bin/env python3
"""Runs the program again and again, each time with another system call that fails or at which it is killed
(tests/faults/fault_library.cpp), and looks at what is left.

After every fault it must hold that the program
  - ended with 0 and the very same result, or with another documented code and a message that names a file
    (killed: no message is asked for),
  - lost or cut no file that was there before,
  - left no process behind and did not hang,
and that a start without faults then ends with the very same result.

  sweep.py PROGRAM LIBRARY                 a sample that fits into --seconds
  sweep.py PROGRAM LIBRARY --all           every call of every operation (takes long)
  sweep.py PROGRAM LIBRARY --all --part 1/2    half of them
"""
import argparse
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

OPERATIONS = {  # what the kernel answers when the device or the disk is at fault
    "open": [errno.EACCES, errno.EIO],
    "read": [errno.EIO],
    "write": [errno.ENOSPC, errno.EIO],
    "rename": [errno.EIO],
    "fsync": [errno.EIO],
    "mmap": [errno.ENOMEM],
    "flock": [errno.ENOLCK],
    "fork": [errno.EAGAIN],
    "thread": [errno.EAGAIN],
}
DOCUMENTED = {0, 1, 2, 3}
LIMIT = 60  # seconds that a command may take; each takes less than one on an idle machine

RUN = """
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data:
  synthetic: {task: chunk_recall, vocab_size: 16, length: 48, chunk: 4}
batch: {global_batch_size: 4, micro_batch_sequences: 2}
balance: {batching: sab, profile: h200-analytic, adapt: false}
train: {max_steps: STEPS, save_steps: 1, save_total_limit: 2, threads: 1, validation_sequences: 2, validation_steps: 2,
        trace: true, output_dir: run}
"""


class Violation(Exception):
    pass


def read(path):
    return pathlib.Path(path).read_bytes()


def training_result(folder, steps):
    """What a run computed, without what its clock said."""
    losses = {}
    for line in read(folder / "run/metrics.jsonl").splitlines():
        values = json.loads(line)
        key = "validation_loss" if "validation_loss" in values else "loss"
        if (key, values["step"]) in losses:
            raise Violation(f"metrics.jsonl has {key} of step {values['step']} twice")
        losses[(key, values["step"])] = values[key]
    planned = {}
    for line in read(folder / "run/plan.jsonl").splitlines():
        values = json.loads(line)
        if "plan" in values:
            planned[values["step"]] = values["plan"]["ranks"]
    checkpoint = folder / f"run/checkpoint-{steps}"
    return (losses, planned, read(folder / "run/final/model.safetensors"), read(checkpoint / "optimizer.safetensors"))


class Scenario:
    """A command in a folder that `prepare` fills; `result` is what must be the same in the end."""

    def __init__(self, name, arguments, prepare, result, again=None):
        self.name, self.arguments, self.prepare, self.result = name, arguments, prepare, result
        self.again = again or arguments  # the start without faults


def file_result(name):
    return lambda folder: read(folder / name)


def scenarios(call):
    """`call(folder, arguments)` runs the program without faults."""

    def write_run(folder, steps):
        (folder / "run.yaml").write_text(RUN.replace("STEPS", str(steps)))

    def half_trained(folder):
        write_run(folder, 2)
        call(folder, ["train", "run.yaml"])
        write_run(folder, 4)

    def trained(folder):
        write_run(folder, 3)
        call(folder, ["train", "run.yaml"])
        (folder / "report.html").write_text("an older report")

    def with_text(folder):
        call(folder, ["data", "synth", "--text", "--task", "niah_single", "--sequences", "20", "--length", "220",
                      "--output", "samples.jsonl"])
        rows = [json.loads(line) for line in read(folder / "samples.jsonl").splitlines()]
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": row["input"]}) + "\n" for row in rows))
        shutil.copytree(TOKENIZER, folder / "tokenizer")

    def with_json(folder):
        (folder / "rows.json").write_text('"older rows"')

    def with_profile(folder):
        (folder / "profile.json").write_text('"an older profile"')
        (folder / "config.json").write_text(json.dumps(
            {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
             "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}))

    def rows(folder):
        values = json.loads(read(folder / "rows.json"))
        for row in [values["dense"], *values["rows"]]:
            del row["planner_ms"]
        return values

    def tokens(folder):
        return tuple(read(folder / f"tokens.{ending}") for ending in ("bin", "idx"))

    def exists(name, *words):
        def check(folder):
            text = (folder / name).read_text()
            return all(word in text for word in words)
        return check

    simulate = ["simulate", "--model", "qwen2.5-0.5b", "--profile", "h200-analytic", "--dp", "2", "--pp", "1",
                "--steps", "2", "--global-batch", "8", "--no-frontier", "--policies", "in_order", "--threads", "1",
                "--lengths", "chatqa2-like", "--json", "rows.json"]
    profile = ["profile", "--model", "config.json", "--max-tokens", "256", "--layers", "3", "--repeats", "1",
               "--held-out", "0", "--threads", "1", "--budget", "640", "--samples", "samples.csv"]
    return [
        Scenario("train", ["train", "run.yaml"], lambda folder: write_run(folder, 3),
                 lambda folder: training_result(folder, 3)),
        Scenario("resume", ["train", "run.yaml"], half_trained, lambda folder: training_result(folder, 4)),
        Scenario("tokenize", ["data", "tokenize", "--tokenizer", "tokenizer", "--input", "text.jsonl", "--output",
                              "tokens", "--workers", "1"], with_text, tokens,
                 again=["data", "tokenize", "--tokenizer", "tokenizer", "--input", "text.jsonl", "--output", "tokens",
                        "--workers", "1", "--overwrite"]),
        Scenario("report", ["report", "run", "--out", "report.html"], trained, file_result("report.html")),
        Scenario("simulate", simulate, with_json, rows),
        Scenario("profile", profile, with_profile, exists("profile.json", "held_out_error")),
    ]


class Sweep:
    def __init__(self, program, library, scratch):
        self.program, self.library, self.scratch = program, library, scratch
        self.tried, self.violations = 0, []

    def start(self, folder, arguments, environment=None):
        """Exit code (minus the signal) and what was printed; Violation when it hangs or leaves processes behind."""
        process = subprocess.Popen([self.program, *arguments], cwd=folder, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**os.environ, **(environment or {})})
        try:
            output = process.communicate(timeout=LIMIT)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Violation(f"still running after {LIMIT} s") from None
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return process.returncode, output
        os.killpg(process.pid, signal.SIGKILL)
        raise Violation("processes were left behind")

    def undisturbed(self, folder, arguments):
        code, output = self.start(folder, arguments)
        if code != 0:
            raise Violation(f"a start without faults ended with {code}: {output[-2000:]}")

    def faulty(self, folder, arguments, **settings):
        environment = {"LD_PRELOAD": self.library, "SB_FAULT_PATH": str(folder)}
        environment["OPENBLAS_NUM_THREADS"] = "1"  # its own threads, which it starts as it is loaded
        environment["ASAN_OPTIONS"] = "verify_asan_link_order=0:detect_leaks=0"
        return self.start(folder, arguments, {**environment, **settings})

    def calls(self, scenario, template):
        """How often the command makes each kind of call, and its result."""
        folder = self.fresh(template)
        counts = self.scratch / "counts"
        code, output = self.faulty(folder, scenario.arguments, SB_FAULT_COUNTS=str(counts))
        if code != 0:
            raise Violation(f"{scenario.name} without a fault ended with {code}: {output[-2000:]}")
        lines = counts.read_text().split()
        return dict(zip(lines[0::2], map(int, lines[1::2]))), scenario.result(folder)

    def fresh(self, template):
        # Under the same name every time, since the program writes names into its files.
        folder = self.scratch / "work"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        return folder

    def check_kept(self, template, folder):
        """Every file that was there before is there, and none is shorter, unless the program had the right to."""
        for before in template.rglob("*"):
            place = before.relative_to(template)
            after = folder / place
            if not before.is_file() or "checkpoint-" in str(place) or place.name in (".lock", "run.yaml"):
                continue
            if not after.is_file():
                raise Violation(f"{place} is gone")
            if place.suffix == ".jsonl":
                # Lines may be added, never taken out.
                if not read(after).startswith(read(before)) and place.name != "plan.jsonl":
                    raise Violation(f"{place} lost lines")
            elif after.stat().st_size < min(before.stat().st_size, 1):
                raise Violation(f"{place} is empty")

    def point(self, scenario, template, result, operation, number, action):
        folder = self.fresh(template)
        code, output = self.faulty(folder, scenario.arguments, SB_FAULT=f"{operation}:{number}:{action}")
        killed = action == "kill"
        if killed and code not in (0, -signal.SIGKILL):
            raise Violation(f"ended with {code}: {output[-1000:]}")
        if not killed and code not in DOCUMENTED:
            raise Violation(f"ended with {code}: {output[-1000:]}")
        if code > 0 and operation not in ("fork", "thread") and not self.names_a_file(output, folder):
            raise Violation(f"ended with {code} and names no file: {output[-1000:]}")
        if code == 0 and scenario.result(folder) != result:
            raise Violation("ended with 0 and another result")
        self.check_kept(template, folder)
        if code == 0:
            return
        self.undisturbed(folder, scenario.again)
        if scenario.result(folder) != result:
            raise Violation("a start without faults afterwards gave another result")

    @staticmethod
    def names_a_file(output, folder):
        last = output.strip().splitlines()[-1] if output.strip() else ""
        names = {path.name for path in folder.rglob("*")} | {"tokens", "rows.json", "profile.json", "samples.csv",
                                                              "report.html", "run", "final", "checkpoint"}
        return any(name in last for name in names)

    def points(self, calls, scenario):
        for operation, errors in OPERATIONS.items():
            for number in range(1, calls.get(operation, 0) + 1):
                for action in [*map(str, errors), "kill"]:
                    yield (scenario, operation, number, action)


TOKENIZER = pathlib.Path(__file__).resolve().parent.parent / "data" / "tokenizer_qwen2_style"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("library")
    parser.add_argument("--all", action="store_true", help="every call, however long that takes")
    parser.add_argument("--seconds", type=float, default=150, help="time for the sample (default 150)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th point from the K-th on, for several at a time")
    parser.add_argument("--scenario", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()

    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="sparsebalance-faults-") as scratch:
        sweep = Sweep(str(pathlib.Path(arguments.program).resolve()), str(pathlib.Path(arguments.library).resolve()),
                      pathlib.Path(scratch))
        begin = time.monotonic()
        prepared, points = {}, []
        for scenario in scenarios(sweep.undisturbed):
            if arguments.scenario and scenario.name not in arguments.scenario:
                continue
            template = pathlib.Path(scratch) / f"template-{scenario.name}"
            template.mkdir()
            scenario.prepare(template)
            calls, result = sweep.calls(scenario, template)
            prepared[scenario.name] = (template, result)
            own = list(sweep.points(calls, scenario))
            print(f"{scenario.name}: {len(own)} points:", ", ".join(f"{n} {o}" for o, n in calls.items() if n))
            points.append(own)
        # All scenarios in turn, so that a short sample has something of each.
        order = random.Random(arguments.seed)
        for own in points:
            order.shuffle(own)
        turns = [point for turn in range(max(map(len, points))) for own in points for point in own[turn:turn + 1]]
        part, parts = map(int, arguments.part.split("/"))
        turns = turns[part - 1::parts]
        for scenario, operation, number, action in turns:
            if not arguments.all and time.monotonic() - begin > arguments.seconds:
                break
            sweep.tried += 1
            if arguments.all and sweep.tried % 200 == 0:
                print(f"{sweep.tried} of {len(turns)} points tried", flush=True)
            try:
                sweep.point(scenario, *prepared[scenario.name], operation, number, action)
            except Violation as violation:
                sweep.violations.append(f"{scenario.name}, {operation} {number}, {action}: {violation}")
                print("VIOLATION", sweep.violations[-1], flush=True)
            except (OSError, ValueError) as error:
                sweep.violations.append(f"{scenario.name}, {operation} {number}, {action}: {error!r}")
                print("VIOLATION", sweep.violations[-1], flush=True)
        print(f"{sweep.tried} of {len(turns)} points tried in {time.monotonic() - begin:.0f} s, "
              f"{len(sweep.violations)} violations")
        return 1 if sweep.violations or sweep.tried == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
