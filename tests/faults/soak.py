#!/usr/bin/env python3
"""Disturbs trainings at random moments for as long as it is told: kills all ranks or one, asks them to stop, halts one
for a while, lets the disk be full from some write on, and starts them again, with the same layout of ranks or another.
Attention is dense or sparse, sequences are whole or in pieces. Every run must end with the losses of an undisturbed
one: the very same numbers, and the same model, where the layout stays; within --tolerance where it changes, since other
ranks add in another order.

  tests/faults/soak.py                      an hour with build/cpu's program
  tests/faults/soak.py --minutes 2
"""
import argparse
import collections
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time

RUN = """
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data:
  synthetic: {task: chunk_recall, vocab_size: 16, length: 450, chunk: 4, lengths: LENGTHS}
attention: ATTENTION
batch: {global_batch_size: 4, micro_batch_sequences: 2}
balance: {batching: sab, profile: h200-analytic, adapt: false, chunk: CHUNK}
optimizer: {learning_rate: 1.0e-3, schedule: constant}
train: {max_steps: STEPS, save_steps: 2, save_total_limit: 3, threads: 1, validation_sequences: 4,
        validation_steps: 10}
"""
SPARSE = "block: 64, budget: 256, dense_below: 64, local_blocks: 1"
ATTENTIONS = {"dense": "{pattern: dense, block: 64}", "topk": f"{{pattern: topk, {SPARSE}}}",
              "mass": f"{{pattern: mass, {SPARSE}}}", "window": f"{{pattern: window, {SPARSE}}}"}
# dp, pp, cp. Those that share sequences do not cut them into pieces.
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2)]
KEPT = [(2, 1, 1), (1, 2, 1), (3, 1, 1), (2, 2, 1)]  # for whole runs
KINDS = {"kill all": 3, "kill one": 3, "stop": 3, "full disk": 3, "halt": 1}  # and how often in comparison
LIMIT = 120  # seconds without a word after which a training counts as one that hangs


class Failure(Exception):
    pass


def descendants(process):
    """Process ids of all that come from it, in the order they were started by each other."""
    children = collections.defaultdict(list)
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it has just ended
            if fields[0] != "Z":
                children[int(fields[1])].append(int(entry.name))
    found = list(children[process])
    for one in found:
        found += children[one]
    return found


def ranks_of(process):
    """mpirun is its child, the ranks are mpirun's."""
    mpirun = descendants(process)[:1]
    return [one for parent in mpirun for one in descendants(parent)]


def send(process, what):
    try:
        os.kill(process, what)
    except ProcessLookupError:
        pass


def losses(folder):
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        kind = "validation_loss" if "validation_loss" in values else "loss"
        if (kind, values["step"]) in found:
            raise Failure(f"metrics.jsonl has {kind} of step {values['step']} twice")
        found[(kind, values["step"])] = values[kind]
    return found


class Soak:
    def __init__(self, arguments, scratch):
        self.arguments, self.scratch = arguments, pathlib.Path(scratch)
        self.random = random.Random(arguments.seed)
        self.counts = collections.Counter()
        self.references = {}
        self.worst = 0.0
        lengths = random.Random(1)
        (self.scratch / "lengths.txt").write_text("".join(f"{lengths.randrange(70, 450)}\n" for _ in range(300)))

    def command(self, setting, folder, layout):
        attention, chunk = setting
        run = RUN.replace("LENGTHS", str(self.scratch / "lengths.txt")).replace("ATTENTION", ATTENTIONS[attention])
        run = run.replace("CHUNK", chunk).replace("STEPS", str(self.arguments.steps))
        (self.scratch / "run.yaml").write_text(run)
        dp, pp, cp = layout
        return [self.arguments.program, "train", str(self.scratch / "run.yaml"), "--ranks", str(dp * pp * cp),
                *[word for name, value in [("train.output_dir", folder), ("parallel.dp", dp), ("parallel.pp", pp),
                                           ("parallel.cp", cp)] for word in ("--set", f"{name}={value}")]]

    def start(self, command, environment=None):
        log = open(self.scratch / "output.txt", "wb")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {})})

    def output(self):
        return (self.scratch / "output.txt").read_text(errors="replace")[-3000:]

    def end(self, process):
        printed, since = -1, time.monotonic()
        while True:
            try:
                return process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                pass
            size = (self.scratch / "output.txt").stat().st_size
            if size != printed:
                printed, since = size, time.monotonic()
            if time.monotonic() - since > LIMIT:
                for one in [process.pid, *descendants(process.pid)]:
                    send(one, signal.SIGKILL)
                process.wait()
                raise Failure(f"not a word for {LIMIT} s: {self.output()}")

    def result(self, folder):
        return losses(folder), (folder / "final/model.safetensors").read_bytes()

    def reference(self, setting, layout):
        if (setting, layout) not in self.references:
            folder = self.scratch / "undisturbed"
            shutil.rmtree(folder, ignore_errors=True)
            if self.end(self.start(self.command(setting, folder, layout))) != 0:
                raise Failure(f"undisturbed: {self.output()}")
            self.references[(setting, layout)] = self.result(folder)
        return self.references[(setting, layout)]

    def strike(self, process, kind):
        ranks = ranks_of(process.pid)
        if not ranks:
            return
        if kind == "kill all":
            for one in [process.pid, *descendants(process.pid)]:
                send(one, signal.SIGKILL)
        elif kind == "kill one":
            send(self.random.choice(ranks), signal.SIGKILL)
        elif kind == "stop":
            send(process.pid, signal.SIGTERM)
        elif kind == "halt":
            one = self.random.choice(ranks)
            send(one, signal.SIGSTOP)
            time.sleep(self.random.uniform(0.1, 2.0))
            send(one, signal.SIGCONT)

    def disturb(self, setting, layout):
        """One start and what happens to it."""
        kind = self.random.choices(list(KINDS), KINDS.values())[0]
        environment = {}
        if kind == "full disk":
            environment = {"LD_PRELOAD": self.arguments.library, "SB_FAULT_PATH": str(self.scratch / "run") + "/",
                           "SB_FAULT": f"write:{self.random.randrange(1, 400)}+:{errno.ENOSPC}"}
        process = self.start(self.command(setting, self.scratch / "run", layout), environment)
        seen = []
        if kind != "full disk":
            try:
                process.wait(timeout=self.random.uniform(0.3, 5.0))
            except subprocess.TimeoutExpired:
                seen = descendants(process.pid)
                self.strike(process, kind)
        code = self.end(process)
        allowed = {"kill all": (0, -signal.SIGKILL), "kill one": (0, 1, 128 + signal.SIGKILL), "stop": (0,),
                   "halt": (0,), "full disk": (0, 2)}[kind]
        # A stop before a rank listens ends it like any other program.
        started = "step" in self.output() or "resumed" in self.output()
        if code not in allowed and not (kind == "stop" and not started):
            raise Failure(f"{kind}: ended with {code}: {self.output()}")
        for _ in range(300):
            left = [one for one in seen if pathlib.Path(f"/proc/{one}").exists()]
            if not left:
                break
            time.sleep(0.1)
        else:
            raise Failure(f"{kind}: processes {left} were left behind")
        self.counts[kind] += 1

    def run(self):
        """One training with disturbances from its beginning to its end."""
        setting = (self.random.choice(list(ATTENTIONS)), self.random.choice(["none", "128"]))
        layouts = [one for one in LAYOUTS if setting[1] == "none" or one[2] == 1]
        fixed = self.random.random() < 0.5
        layout = self.random.choice(KEPT) if fixed else KEPT[0]
        expected, model = self.reference(setting, layout)
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        starts = 0
        while not (folder / "final").exists():
            self.disturb(setting, layout if fixed else self.random.choice(layouts))
            starts += 1
        found, found_model = self.result(folder)
        if found.keys() != expected.keys():
            raise Failure(f"the record has {sorted(found)}")
        if fixed and (found, found_model) != (expected, model):
            raise Failure("with the same layout throughout, losses or the model differ from the undisturbed run's")
        difference = max(abs(found[key] - expected[key]) / abs(expected[key]) for key in expected)
        if difference > self.arguments.tolerance:
            raise Failure(f"a loss differs by {difference:.1e} from the undisturbed run's")
        self.worst = max(self.worst, difference)
        self.counts["runs, layout kept" if fixed else "runs, layouts changing"] += 1
        print(f"{time.strftime('%H:%M:%S')} {setting[0]}, pieces {setting[1]}, "
              f"{'dp {} pp {} cp {}'.format(*layout) if fixed else 'changing layouts'}: {starts} starts, "
              f"differs by {difference:.1e}", flush=True)

    def soak(self):
        begin = time.monotonic()
        while not self.counts or time.monotonic() - begin < 60 * self.arguments.minutes:
            self.run()
        print(f"{(time.monotonic() - begin) / 60:.0f} minutes:",
              ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())),
              f"largest difference of a loss where layouts change {self.worst:.1e}", sep=" ")


def main():
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(root / "build/cpu/src/cli/sparsebalance"))
    parser.add_argument("--library", default=str(root / "build/cpu/tests/faults/libsb_faults.so"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative, of losses where the layout changes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="sparsebalance-soak-") as scratch:
        try:
            Soak(arguments, scratch).soak()
        except Failure as failure:
            kept = pathlib.Path(tempfile.mkdtemp(prefix="sparsebalance-soak-failed-"))
            shutil.copytree(scratch, kept, dirs_exist_ok=True)
            raise SystemExit(f"{failure}\nthe run is kept in {kept}")


if __name__ == "__main__":
    main()
