#!/usr/bin/env python3
"""Does training with SparseBalance cost a model anything on real long text, and how much time would it save on a cluster? A model
of 27M parameters (Qwen2 shape, 8 layers, hidden 512, 8:2 heads of 64) learns 52M tokens of the corpus dense at 4,096 tokens. From
there it is extended to sequences of up to 32,768 (later 65,536) tokens of the corpus' own length mix, by

  dense       all pairs, sequences in order
  fixed       our router (planes, mass) at one budget, in order
  optimal     SparseBalance: the same router, batches and order balanced, budgets tuned at equal coverage
  published   block means with look-ahead, topk, one budget, in order
  anchor      as optimal, budgets by the paper's rule (anchor: mean, p = 0.1)
  pieces      as optimal, long sequences cut into pieces

on the same data in the same order, each rehearsing a cluster of dp 4 x pp 4 with 16 sequences a step. Measured for each: held-out
loss by position, as trained and with dense attention (fixed and optimal also at four fifths of the budget); loss and accuracy on
passages copied from 10K to 60K tokens back; coverage, tokens/s here, predicted time on the cluster; and how many answers about
needles and variables are right after the same short fine-tuning.

    scripts/make-corpus.py --out corpus --sources linux glibc go rust python --text-mb 170 --vocabulary 8192 --bpe-mb 40
    bench/quality/extension.py --data corpus --device cuda --out results --minutes 9
    bench/quality/extension_report.py results/results.json --out docs/results

Runs come in the order of their importance, --jobs of them at a time; OUT/results.json has what is finished at any time, and the same
command goes on from there (with another --work folder it learns a base of its own, and differences are taken within a base only).
Speeds are measured with nothing beside them: where several run at a time, by a few more steps of each at the end. Token files may
be packed with xz. --small is a tiny model for a CPU: it shows that the script works, nothing else."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import secrets
import shutil
import statistics
import subprocess
import sys
import threading
import time

import extension_data
import token_files
from routers import OutOfTime, Program
from runs import metrics

OURS = {"pattern": "mass", "score": "planes", "score_channels": 32}
BALANCED = {"batching": "sab", "ordering": "auto", "tuning": "optimal"}
# The attention section, by how much more than the keys of an exact window the budget must be for the same pairs (routers.py), and
# the balance section.
METHODS = {
    "dense": ({"pattern": "dense"}, 1.0, {}),
    "fixed": (OURS, 1.02, {}),
    "optimal": (OURS, 1.02, BALANCED),
    "published": ({"pattern": "topk", "selection": "lookahead", "score": "mean"}, 1.06, {}),
    "anchor": (OURS, 1.02, dict(BALANCED, tuning="anchor", anchor="mean", p=0.1)),
    "pieces": (OURS, 1.02, BALANCED),
}
FULL = {"layers": 8, "hidden": 512, "intermediate": 1408, "heads": 8, "kv_heads": 2, "head_dim": 64, "base_length": 4096,
        "base_batch": 16, "base_micro_batch": 65536, "base_tokens": 52, "lengths": (32768, 65536), "passage": 1024,
        "back": (10000, 20000, 30000, 40000, 60000), "block": 128, "piece": 8192, "shares": (0.25, 0.12), "sequences": 16,
        "task_lengths": (192, 1024, 16384), "task_steps": 160, "task_batch": 80, "task_sequences": 256,
        "speed_steps": 24, "rehearse": {"dp": 4, "pp": 4}}
SMALL = {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "base_length": 128,
         "base_batch": 8, "base_micro_batch": 1024, "base_tokens": 0.004, "lengths": (1024, 2048), "passage": 128,
         "back": (400, 800, 1500), "block": 64, "piece": 256, "shares": (0.7, 0.55), "sequences": 4,
         "task_lengths": (192, 256, 512), "task_steps": 2, "task_batch": 4, "task_sequences": 4, "speed_steps": 2,
         "rehearse": {"dp": 4, "pp": 2}}
BATCH = 16
PROFILE_SECONDS = 90
EVALUATION_SECONDS = 12  # of the last runs, after the time is over
# Tuning gives long sequences, which are what is evaluated, less than the budget in training: about so much. Models that were trained
# with it and without are evaluated at that, too.
REDUCED = 0.8


def jobs(seeds, size):
    """(kind, method, length, share of the pairs, seed), the kind `extend` or `tasks`, in the order of importance."""
    long, longer = size["lengths"]
    quarter, eighth = size["shares"]
    first, *others = seeds
    pairs = ("fixed", "optimal")
    order = [(method, long, quarter, first) for method in (*pairs, "dense")]
    order += [(method, long, quarter, seed) for seed in others for method in pairs]
    order += [(method, long, eighth, seed) for seed in seeds for method in pairs]
    order += [("published", long, quarter, first)]
    order += [(method, longer, quarter, first) for method in ("dense", *pairs)]
    order = [("extend", *one) for one in order]
    order += [("tasks", method, long, quarter, first) for method in ("dense", *pairs)]
    order += [("extend", method, long, quarter, first) for method in ("pieces", "anchor")]
    order += [("tasks", "published", long, quarter, first)]
    order += [("extend", method, long, quarter, seed) for method in ("anchor", "dense", "published") for seed in others]
    return order


def cut(lengths, most):
    """Sequences as training sees them: longer documents in parts."""
    return [part for length in lengths for part in [most] * (length // most) + [length % most] * (length % most > 0)]


def budget_for(lengths, share):
    """Keys per query of a window that reads this share of the causal pairs of sequences of these lengths."""
    def pairs(budget):
        return sum(budget * n - budget**2 / 2 if n > budget else n**2 / 2 for n in lengths)
    low, high, wanted = 1, max(lengths), share * sum(n**2 / 2 for n in lengths)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pairs(middle) < wanted else (low, middle)
    return low


class Experiment:
    def __init__(self, arguments):
        self.arguments, self.size = arguments, SMALL if arguments.small else FULL
        self.work, self.out = arguments.work, arguments.out
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.program = Program(arguments.program.resolve(), self.work, arguments.minutes)
        self.lock = threading.Lock()
        self.evaluations = concurrent.futures.ThreadPoolExecutor(4)
        self.pending = []
        self.took = {}
        self.results_file = self.out / "results.json"
        self.results = {"device": arguments.device, "small": arguments.small, "batch": BATCH, "rehearse": self.size["rehearse"],
                        "runs": {}, "bases": {}}
        if self.results_file.exists():
            self.results = json.loads(self.results_file.read_text(encoding="utf-8"))
            self.results.pop("failed", None)  # what failed is tried again

    def say(self, text):
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", file=sys.stderr, flush=True)

    def save(self):
        with self.lock:
            partial = self.results_file.with_suffix(".partial")
            partial.write_text(json.dumps(self.results) + "\n", encoding="utf-8")
            partial.replace(self.results_file)

    def prepare(self):
        self.corpus = extension_data.unpack(self.arguments.data, self.work / "corpus")
        self.vocabulary = json.loads((self.corpus / "manifest.json").read_text(encoding="utf-8"))["vocabulary"]
        self.train_lengths = list(token_files.TokenFile(self.corpus / "train").lengths)
        self.write_training(self.size["base_length"])
        self.say("corpus unpacked")

    def prepare_long(self):
        """What the extensions need, made while the base learns."""
        self.lengths = []
        for length in self.size["lengths"]:
            self.write_training(length)
            if extension_data.write_held_out(self.corpus, self.work, self.size, length):
                self.lengths.append(length)
            else:
                self.say(f"validation has fewer than two sequences of {length} tokens: no runs at that length")
        extension_data.write_tasks(self.program, self.work, self.vocabulary, self.size)

    def write_training(self, length):
        extension_data.write_training(self.corpus, self.training(length), length, min(extension_data.PASSAGE[1], length // 4))

    def training(self, length):
        return self.work / f"train-{length}"

    def run_file(self, model, length, batch, micro_batch, rate, train):
        threads = {"threads": max(1, (os.cpu_count() or 1) // (self.arguments.jobs + 1))} if self.arguments.jobs > 1 else {}
        return {"device": self.arguments.device, "model": model,
                "data": {"train": [str(self.training(length))], "max_sequence_length": length},
                "batch": {"global_batch_size": batch, "micro_batch_tokens": max(length, micro_batch)},
                "optimizer": {"learning_rate": rate, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_ratio": 0.08,
                              "min_learning_rate_ratio": 0.1},
                "train": {"save_steps": 0, "save_total_limit": 1, "log_steps": 20, "tensorboard": False, **threads, **train}}

    def learn_base(self):
        """The dense model at the short length; runs are compared within one base only."""
        size = self.size
        model = {"init": {"model_type": "qwen2", "vocab_size": self.vocabulary, "hidden_size": size["hidden"],
                          "intermediate_size": size["intermediate"], "num_hidden_layers": size["layers"],
                          "num_attention_heads": size["heads"], "num_key_value_heads": size["kv_heads"],
                          "head_dim": size["head_dim"], "rope_theta": 500000,
                          "max_position_embeddings": max(size["lengths"])}}
        config = self.run_file(model, size["base_length"], size["base_batch"], size["base_micro_batch"], 1.5e-3,
                               {"max_steps": self.steps(size["base_length"], size["base_batch"], size["base_tokens"]), "seed": 1})
        folder = self.program.train("base", config)
        name = folder / "base-name"
        if not name.exists():
            name.write_text(secrets.token_hex(4), encoding="utf-8")
        self.base, self.base_name = folder / "final", name.read_text(encoding="utf-8")
        self.results["bases"].setdefault(self.base_name, summary(folder))
        self.save()
        base = self.results["bases"][self.base_name]
        self.say(f"base {self.base_name}: loss {base['losses'][-1]:.3f}, {base['tokens_per_second']:.0f} tokens/s")

    def settle_profile(self):
        """Latencies of what the cluster's GPUs are taken to be: by default this device, measured for the model's shape."""
        self.profile = used = self.arguments.profile
        if self.profile == "measure":
            file = self.work / "profile.json"
            self.profile = str(file)
            try:
                self.measure_profile(file)
            except OutOfTime:
                self.profile = used = "h200-analytic"
                self.say(f"measuring took more than {PROFILE_SECONDS} s: predictions are those of {used}")
        self.results["bases"][self.base_name]["profile"] = used
        self.save()

    def measure_profile(self, file):
        if not file.exists():
            config = self.extension_file("fixed", max(self.size["lengths"]), self.size["shares"][0], 1, "h200-analytic")
            (self.work / "profile.yaml").write_text(json.dumps(config), encoding="utf-8")
            limited = Program(self.program.path, self.work, PROFILE_SECONDS / 60)
            limited.run(["profile", "--run", self.work / "profile.yaml", "--out", file], self.work / "profile.log")
            self.say("profile measured")
        shutil.copy(file, self.out / "profile.json")

    def steps(self, length, batch, millions):
        return max(2, round(millions * 1e6 / (batch * statistics.mean(cut(self.train_lengths, length)))))

    def attention(self, method, length, share):
        pattern, factor, _ = METHODS[method]
        if method == "dense":
            return dict(pattern)
        budget = round(factor * budget_for(cut(self.train_lengths, length), share))
        return dict(pattern, block=self.size["block"], budget=budget)

    def extension_file(self, method, length, share, seed, profile):
        config = self.run_file({"path": str(self.base)}, length, BATCH, length, 5e-4,
                               {"max_steps": self.steps(length, BATCH, self.arguments.tokens), "seed": seed})
        balance = dict(METHODS[method][2], profile=profile)
        if method == "pieces":
            balance["chunk"] = self.size["piece"]
        return dict(config, attention=self.attention(method, length, share), balance=balance,
                    parallel={"rehearse": self.size["rehearse"]})

    def key(self, *run):
        return f"{self.base_name}-{run_name(*run)}"

    def extend(self, method, length, share, seed):
        key = self.key(method, length, share, seed)
        folder = self.program.train(key, self.extension_file(method, length, share, seed, self.profile))
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        entry = {"method": method, "length": length, "share": share, "seed": seed, "base": self.base_name,
                 "budget": self.attention(method, length, share).get("budget"), **summary(folder)}
        if self.arguments.jobs > 1:
            entry.pop("tokens_per_second")  # others ran beside it
        with self.lock:
            entry = self.results["runs"].setdefault(key, entry)
        self.save()
        self.say(f"{key}: last losses {statistics.mean(entry['losses'][-10:]):.4f}")
        self.evaluate_later(entry, folder, [one for one in evaluations(method) if loss_key(*one) not in entry])

    def evaluate_later(self, entry, folder, wanted):
        """Beside the next training. Its time may go past the end: the program is not stopped by it."""
        submitted = [self.evaluations.submit(self.evaluate, entry, folder, kind, way) for kind, way in wanted]
        with self.lock:
            self.pending += submitted

    def evaluate(self, entry, folder, kind, way):
        result = self.work / f"eval-{folder.name}-{kind}-{way}.json"
        task = kind in extension_data.TASKS
        data, most = (f"{kind}-validation", self.size["task_lengths"][-1]) if task else (f"{kind}-{entry['length']}", entry["length"])
        command = [self.program.path, "eval", "ppl", "--model", folder / "final", "--data", self.work / data, "--max-tokens", most,
                   "--device", self.arguments.device, "--json", result, "--attention", *self.attention_words(entry, way)]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        found = json.loads(result.read_text(encoding="utf-8"))
        key = loss_key(kind, way)
        with self.lock:
            if task:
                entry.setdefault("tasks", {})[kind] = {"accuracy": found["accuracy"], "loss": found["rows"][-1]["loss"]}
            else:
                entry[key], entry[key + " accuracy"] = found["rows"][-1]["loss"], found["accuracy"]
            if kind == "held-out":
                entry[key + " by position"] = {row["positions"]: row["loss"] for row in found["rows"][:-1]}
                if way == "as-trained":
                    entry["held-out density"], entry["held-out coverage"] = found["density"], found["coverage"]
        self.save()
        if task:
            self.say(f"{kind} after {entry['method']}: {100 * found['accuracy']:.1f} % right")

    def attention_words(self, entry, way):
        if way != "reduced":
            return [way]
        run = [entry[name] for name in ("method", "length", "share", "seed")]
        config = self.extension_file(*run, self.profile)
        del config["balance"], config["parallel"]
        config["attention"]["budget"] = round(REDUCED * config["attention"]["budget"])
        file = self.work / f"{self.key(*run)}-reduced.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")
        return ["as-trained", "--run-config", file]

    def tasks(self, method, length, share, seed):
        """A short fine-tuning on needles and chains of variables, with the attention of the extension."""
        source = self.key(method, length, share, seed)
        if source not in self.results["runs"]:
            self.say(f"no tasks after {source}, which is not there")
            return
        size = self.size
        config = self.run_file({"path": str(self.work / source / "final")}, size["task_lengths"][-1], size["task_batch"],
                               size["base_micro_batch"], 1e-3, {"max_steps": size["task_steps"], "seed": seed})
        config["data"]["train"] = [str(self.work / f"{task}-train") for task in extension_data.TASKS]
        folder = self.program.train(f"{source}-tasks", dict(config, attention=self.attention(method, length, share)))
        rows = metrics(folder)
        self.say(f"tasks after {method}: loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}")
        way = "dense" if method == "dense" else "as-trained"
        self.evaluate_later(self.results["runs"][source], folder, [(task, way) for task in extension_data.TASKS])

    def speed(self, key, entry):
        """Tokens/s with nothing beside it, of some more steps from the run's end, in which selection has what it learned."""
        run = [entry[name] for name in ("method", "length", "share", "seed")]
        config = self.extension_file(*run, self.profile)
        config["model"] = {"path": str(self.work / key / "final")}
        config["train"]["max_steps"] = self.size["speed_steps"]
        folder = self.program.train(f"{key}-speed", config)
        entry["tokens_per_second"] = summary(folder)["tokens_per_second"]
        self.save()
        self.say(f"{key}: {entry['tokens_per_second']:.0f} tokens/s alone")

    def done(self, job):
        kind, *run = job
        entry = self.results["runs"].get(self.key(*run))
        return set(extension_data.TASKS) <= set((entry or {}).get("tasks", {})) if kind == "tasks" else evaluated(entry)

    def trained(self, job):
        kind, *run = job
        return (self.work / (self.key(*run) + ("-tasks" if kind == "tasks" else "")) / "final").exists()

    def fits(self, job):
        """Whether a job would end in time, by the last one of its kind; one that is trained has its evaluations to do alone."""
        if self.program.deadline is None:
            return True
        kind, method, length, *_ = job
        training = 0
        if not self.trained(job):
            guess = 25 if kind == "tasks" else self.arguments.tokens / (0.27 if method == "dense" else 0.5)
            training = self.took.get((kind, method == "dense", length), guess * self.arguments.jobs)
        return time.monotonic() + training + EVALUATION_SECONDS < self.program.deadline

    def attempt(self, job):
        kind, method, length, *_ = job
        if not self.fits(job):
            self.say(f"no time for {job}")
            return
        begin, trained = time.monotonic(), self.trained(job)
        try:
            (self.tasks if kind == "tasks" else self.extend)(*job[1:])
            if not trained:
                self.took[kind, method == "dense", length] = time.monotonic() - begin
        except OutOfTime:
            self.say(f"time is over in {job}; the same command goes on there")
        except SystemExit as error:  # one that fails does not take the others with it
            self.fail(f"{job}: {error}")
        self.collect(wait=False)

    def run(self):
        self.prepare()
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            data = beside.submit(self.prepare_long)
            self.learn_base()
            data.result()
        self.settle_profile()
        wanted = [job for job in jobs(self.arguments.seeds, self.size) if job[2] in self.lengths and not self.done(job)]
        with concurrent.futures.ThreadPoolExecutor(self.arguments.jobs) as trainings:
            for future in [trainings.submit(self.attempt, job) for job in wanted]:
                future.result()
        self.collect()
        self.measure_speeds()

    def measure_speeds(self):
        """Of the first seed's runs, those that shared the GPU."""
        for kind, *run in jobs(self.arguments.seeds[:1], self.size):
            entry = self.results["runs"].get(self.key(*run))
            if kind == "extend" and entry is not None and "tokens_per_second" not in entry:
                self.speed(self.key(*run), entry)

    def collect(self, wait=True):
        """Errors of evaluations; with `wait` all of them."""
        with self.lock:
            ready = [future for future in self.pending if wait or future.done()]
            self.pending = [future for future in self.pending if future not in ready]
        for future in ready:
            try:
                future.result()
            except RuntimeError as error:
                self.fail(f"an evaluation: {error}")

    def fail(self, what):
        self.say(f"FAILED {what}")
        with self.lock:
            self.results.setdefault("failed", []).append(what)


def run_name(method, length, share, seed):
    return f"{method}-{length}" + ("" if method == "dense" else f"-{round(100 * share)}") + f"-seed{seed}"


def evaluations(method):
    """What a run is evaluated on, and with which attention."""
    if method == "dense":
        return [("held-out", "dense"), ("copied", "dense")]
    reduced = [("held-out", "reduced")] if method in ("fixed", "optimal") else []
    return [("held-out", "as-trained"), ("copied", "as-trained"), ("held-out", "dense"), *reduced]


def loss_key(kind, way):
    return f"{kind} {way.replace('-', ' ')}"


def evaluated(entry):
    """Whether nothing is left to do for a run: it may have been stopped between its training and its evaluations."""
    return entry is not None and all(loss_key(kind, way) in entry for kind, way in evaluations(entry["method"]))


def summary(folder):
    rows = [row for row in metrics(folder) if "loss" in row]
    late = rows[len(rows) // 2:]
    found = {"steps": rows[-1]["step"], "tokens": sum(row["tokens"] for row in rows),
             "losses": [round(row["loss"], 5) for row in rows], "step_tokens": [row["tokens"] for row in rows],
             "tokens_per_second": statistics.median(row["tokens_per_second"] for row in late)}
    for key in ("cluster_step_ms", "predicted_in_order_ms"):
        if key in rows[0]:
            found[key] = [round(row[key], 3) for row in rows]
    for key in ("density", "coverage", "predicted_bubble_percent"):
        if key in rows[-1]:
            found[key] = statistics.mean(row[key] for row in late if key in row)
    return found


def self_test():
    extension_data.self_test()
    assert cut([10, 4, 12], 5) == [5, 5, 4, 5, 5, 2]
    assert budget_for([1000], 0.75) in range(498, 502), "half the keys are three quarters of the pairs"
    assert budget_for([1000, 100], 1.0) >= 998
    order = jobs([1, 2, 3], FULL)
    assert order[0] == ("extend", "fixed", 32768, 0.25, 1) and len(set(order)) == len(order) == 29
    quarter = {job[1:] for job in order if job[0] == "extend" and job[2:4] == (32768, 0.25)}
    assert {(job[0], job[3]) for job in quarter} == {("pieces", 1)} | {
        (method, seed) for method in METHODS if method != "pieces" for seed in (1, 2, 3)}
    for place, job in enumerate(order):
        assert job[0] != "tasks" or ("extend", *job[1:]) in order[:place - 2], "what is fine-tuned comes well before"
    assert run_name("fixed", 32768, 0.12, 2) == "fixed-32768-12-seed2"
    assert not evaluated(None)
    assert not evaluated({"method": "dense"}) and not evaluated({"method": "dense", "held-out dense": 1.0})
    assert evaluated({"method": "dense", "held-out dense": 1.0, "copied dense": 1.0})
    two = {"method": "fixed", "held-out dense": 1.0, "held-out as trained": 1.0}
    assert not evaluated(dict(two, **{"copied as trained": 1.0}))
    assert evaluated(dict(two, **{"copied as trained": 1.0, "held-out reduced": 1.0}))
    print("self-test: passed")


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, help="default: that of the device's build")
    parser.add_argument("--data", type=pathlib.Path, help="what scripts/make-corpus.py wrote, .bin files perhaps as .bin.xz")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/extension"), help="results.json")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/extension/work"), help="models and runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (1); evaluations run beside them")
    parser.add_argument("--minutes", type=float, help="begin nothing that would not end by then")
    parser.add_argument("--tokens", type=float, help="of an extension, in millions (20.8, so that it is 20 whatever is drawn; "
                                                     "--small: 0.05)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--profile", default=None, help="`measure` (the default), a file, or the name of a built-in one")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if arguments.data is None:
        parser.error("--data is needed: the folder that scripts/make-corpus.py wrote")
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: at least 1")
    arguments.program = arguments.program or root / f"build/{arguments.device}/src/cli/sparsebalance"
    arguments.tokens = arguments.tokens or (0.05 if arguments.small else 20.8)
    arguments.profile = arguments.profile or ("h200-analytic" if arguments.small else "measure")
    experiment = Experiment(arguments)
    try:
        experiment.run()
    except OutOfTime:
        experiment.say("time is over; the same command goes on")
    finally:
        experiment.collect()
        experiment.save()
    return 1 if experiment.results.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
