#!/usr/bin/env python3
"""Does training with SparseBalance cost a model anything on real long text, and how much time would it save on a cluster? A model
of 27M parameters (Qwen2 shape, 8 layers, hidden 512, 8:2 heads of 64) learns one pass of the corpus dense at 4,096 tokens. From
there it is extended to sequences of up to 32,768 (later 65,536) tokens of the corpus' own length mix, by

  dense       all pairs, sequences in order
  fixed       our router (planes, mass) at one budget, in order
  optimal     SparseBalance: the same router, batches and order balanced, budgets tuned at equal coverage
  published   block means with look-ahead, topk, one budget, in order
  anchor      as optimal, budgets by the paper's rule (anchor: mean, p = 0.1)
  pieces      as optimal, long sequences cut into pieces

on the same data in the same order, each rehearsing a cluster of dp 4 x pp 4 with 16 sequences a step. Measured for each: held-out
loss by position and on passages copied from 10K to 60K tokens back, as trained and with dense attention; coverage, tokens/s here,
predicted time on the cluster; and recall of needles and variables after the same short fine-tuning.

    scripts/make-corpus.py --out corpus --sources linux glibc go rust python --text-mb 170 --vocabulary 8192 --bpe-mb 40
    bench/quality/extension.py --data corpus --device cuda --out results --minutes 9
    bench/quality/extension_report.py results/results.json --out docs/results

Runs come in the order of their importance; OUT/results.json has what is finished at any time, and the same command goes on from
there (with another --work folder it learns a base of its own, and differences are taken within a base only). Token files may be
packed with xz. --small is a tiny model for a CPU: it shows that the script works, nothing else."""

import argparse
import concurrent.futures
import json
import lzma
import pathlib
import secrets
import shutil
import statistics
import subprocess
import sys
import threading
import time

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
TASKS = ("needle_multi_key", "variable_tracking")
FULL = {"layers": 8, "hidden": 512, "intermediate": 1408, "heads": 8, "kv_heads": 2, "head_dim": 64, "base_length": 4096,
        "base_batch": 32, "base_micro_batch": 65536, "lengths": (32768, 65536), "passage": 1024,
        "back": (10000, 20000, 30000, 40000, 60000), "block": 128, "piece": 8192, "shares": (0.25, 0.12), "sequences": 16,
        "task_length": 16384, "task_steps": 40, "max_base_steps": None, "rehearse": {"dp": 4, "pp": 4}}
SMALL = {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "base_length": 128,
         "base_batch": 8, "base_micro_batch": 1024, "lengths": (1024, 2048), "passage": 128, "back": (400, 800, 1500),
         "block": 64, "piece": 256, "shares": (0.7, 0.55), "sequences": 4, "task_length": 512, "task_steps": 2,
         "max_base_steps": 4, "rehearse": {"dp": 4, "pp": 2}}
BATCH = 16
PROFILE_SECONDS = 90
EVALUATION_SECONDS = 8  # of the last run, after the time is over


def jobs(seeds, size):
    """(method, length, share of the pairs, seed) and, last, tasks as (task, method), in the order of importance."""
    long, longer = size["lengths"]
    quarter, eighth = size["shares"]
    first, *others = seeds
    order = [(method, long, quarter, first) for method in ("dense", "fixed", "optimal", "published", "anchor")]
    order += [(method, long, eighth, first) for method in ("fixed", "optimal")]
    order += [(method, long, quarter, seed) for seed in others for method in ("fixed", "optimal")]
    order += [("pieces", long, quarter, first)]
    order += [(method, long, eighth, seed) for seed in others for method in ("fixed", "optimal")]
    order += [(task, method, first) for task in TASKS for method in ("fixed", "optimal", "dense")]
    order += [(method, long, quarter, seed) for seed in others for method in ("dense", "published", "anchor")]
    order += [(method, longer, quarter, first) for method in ("dense", "fixed", "optimal")]
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

    def unpack(self):
        """The corpus, out of its .xz files where it is packed."""
        data = self.arguments.data
        if not (data / "train.bin.xz").exists():
            return data
        folder = self.work / "corpus"
        if not (folder / "manifest.json").exists():
            folder.mkdir(exist_ok=True)
            for name in ("train", "validation"):
                with lzma.open(data / f"{name}.bin.xz") as packed, open(folder / f"{name}.bin", "wb") as out:
                    shutil.copyfileobj(packed, out, 1 << 20)
                shutil.copy(data / f"{name}.idx", folder)
            shutil.copy(data / "manifest.json", folder)
            self.say("corpus unpacked")
        return folder

    def prepare(self):
        """Held-out pieces of exactly each length, and the same with a passage that was there before."""
        self.corpus = self.unpack()
        self.train_lengths = list(token_files.TokenFile(self.corpus / "train").lengths)
        for length in self.size["lengths"]:
            if (self.work / f"copied-{length}.idx").exists():
                continue
            # A document a little shorter than the length is as good as none: 64K were cut at file borders.
            pieces = list(token_files.TokenFile(self.corpus / "validation").pieces(length, per_document=1))
            wanted = min(self.size["sequences"], len(pieces))
            if wanted < 2:
                self.say(f"validation has {len(pieces)} documents of {length} tokens: no runs at that length")
                continue
            chosen = [pieces[i * len(pieces) // wanted] for i in range(wanted)]
            passage = self.size["passage"]
            backs = [back for back in self.size["back"] if back + passage <= length]
            token_files.write(self.work / f"held-out-{length}", chosen)
            token_files.write(self.work / f"copied-{length}",
                              [token_files.copied(piece, passage, backs[i % len(backs)]) for i, piece in enumerate(chosen)],
                              (length - passage, length))

    def run_file(self, model, length, batch, micro_batch, rate, train):
        return {"device": self.arguments.device, "model": model,
                "data": {"train": [str(self.corpus / "train")], "max_sequence_length": length},
                "batch": {"global_batch_size": batch, "micro_batch_tokens": max(length, micro_batch)},
                "optimizer": {"learning_rate": rate, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_ratio": 0.08,
                              "min_learning_rate_ratio": 0.1},
                "train": dict({"save_steps": 0, "save_total_limit": 1, "log_steps": 20, "tensorboard": False}, **train)}

    def learn_base(self):
        """The dense model at the short length; runs are compared within one base only."""
        size = self.size
        vocabulary = json.loads((self.corpus / "manifest.json").read_text(encoding="utf-8"))["vocabulary"]
        model = {"init": {"model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": size["hidden"],
                          "intermediate_size": size["intermediate"], "num_hidden_layers": size["layers"],
                          "num_attention_heads": size["heads"], "num_key_value_heads": size["kv_heads"],
                          "head_dim": size["head_dim"], "rope_theta": 500000,
                          "max_position_embeddings": max(size["lengths"])}}
        steps = {"max_steps": size["max_base_steps"]} if size["max_base_steps"] else {"num_train_epochs": 1}
        folder = self.program.train(f"base-{max(size['lengths'])}", self.run_file(model, size["base_length"], size["base_batch"],
                                                          size["base_micro_batch"], 1.5e-3, dict(steps, seed=1)))
        name = folder / "base-name"
        if not name.exists():
            name.write_text(secrets.token_hex(4), encoding="utf-8")
        self.base, self.base_name = folder / "final", name.read_text(encoding="utf-8")
        self.results["bases"][self.base_name] = summary(folder)
        self.save()
        self.say(f"base {self.base_name}: loss {self.results['bases'][self.base_name]['losses'][-1]:.3f}")

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

    def steps(self, length):
        mean = statistics.mean(cut(self.train_lengths, length))
        return max(2, round(self.arguments.tokens * 1e6 / (BATCH * mean)))

    def attention(self, method, length, share):
        pattern, factor, _ = METHODS[method]
        if method == "dense":
            return dict(pattern)
        budget = round(factor * budget_for(cut(self.train_lengths, length), share))
        return dict(pattern, block=self.size["block"], budget=budget)

    def extension_file(self, method, length, share, seed, profile):
        config = self.run_file({"path": str(self.base)}, length, BATCH, length, 5e-4,
                               {"max_steps": self.steps(length), "seed": seed})
        balance = dict(METHODS[method][2], profile=profile)
        if method == "pieces":
            balance["chunk"] = self.size["piece"]
            config["batch"]["micro_batch_tokens"] = length
        return dict(config, attention=self.attention(method, length, share), balance=balance,
                    parallel={"rehearse": self.size["rehearse"]})

    def extend(self, method, length, share, seed):
        name = run_name(method, length, share, seed)
        folder = self.program.train(f"{self.base_name}-{name}",
                                    self.extension_file(method, length, share, seed, self.profile))
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        entry = {"method": method, "length": length, "share": share, "seed": seed, "base": self.base_name,
                 "budget": self.attention(method, length, share).get("budget"), **summary(folder)}
        with self.lock:
            runs, key = self.results["runs"], f"{self.base_name}-{name}"
            if "tasks" in runs.get(key, {}):
                entry["tasks"] = runs[key]["tasks"]
            runs[key] = entry
        self.save()
        self.say(f"{name}: last losses {statistics.mean(entry['losses'][-10:]):.4f}, {entry['tokens_per_second']:.0f} tokens/s")
        self.pending += [self.evaluations.submit(self.evaluate, entry, folder, kind, way) for kind, way in evaluations(method)]

    def evaluate(self, entry, folder, kind, way):
        """Runs beside the next training. Its time may go past the end: the program below is not stopped by it."""
        result = self.out / f"eval-{folder.name}-{kind}-{way}.json"
        command = [self.program.path, "eval", "ppl", "--model", folder / "final", "--data",
                   self.work / f"{kind}-{entry['length']}", "--max-tokens", entry["length"], "--device", self.arguments.device,
                   "--attention", way, "--json", result]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        found = json.loads(result.read_text(encoding="utf-8"))
        result.unlink()
        key = loss_key(kind, way)
        with self.lock:
            entry[key] = found["rows"][-1]["loss"]
            if kind == "held-out":
                entry[key + " by position"] = {row["positions"]: row["loss"] for row in found["rows"][:-1]}
                if way != "dense":
                    entry["held-out density"], entry["held-out coverage"] = found["density"], found["coverage"]
        self.save()

    def fine_tune(self, task, method, seed):
        """Recall after a few steps of a generated task, with the attention of the extension."""
        length, share = self.size["lengths"][0], self.size["shares"][0]
        source = f"{self.base_name}-{run_name(method, length, share, seed)}"
        if source not in self.results["runs"]:
            return
        vocabulary = json.loads((self.corpus / "manifest.json").read_text(encoding="utf-8"))["vocabulary"]
        tokens = self.size["task_length"]
        config = self.run_file({"path": str(self.work / source / "final")}, tokens, BATCH, tokens, 5e-4,
                               {"max_steps": self.size["task_steps"], "seed": seed, "validation_sequences": 64,
                                "validation_steps": self.size["task_steps"]})
        config["data"] = {"synthetic": {"task": task, "vocab_size": vocabulary, "length": tokens,
                                        "min_length": tokens // 8}, "max_sequence_length": tokens}
        folder = self.program.train(f"{source}-{task}", dict(config, attention=self.attention(method, length, share)))
        rows = [row for row in metrics(folder) if "validation_accuracy" in row]
        with self.lock:
            self.results["runs"][source].setdefault("tasks", {})[task] = {
                "accuracy": rows[-1]["validation_accuracy"], "loss": rows[-1]["validation_loss"]}
        self.save()
        self.say(f"{task} after {method}: {100 * rows[-1]['validation_accuracy']:.1f} %")

    def fits(self, job, took, trained):
        """Whether a job would end in time, by the last one of its kind; one that is trained has its evaluations to do alone."""
        if self.program.deadline is None:
            return True
        kind = job[0] if job[0] in TASKS else (job[0] == "dense", job[1])
        guess = 25 if job[0] in TASKS else self.arguments.tokens / (0.25 if job[0] == "dense" else 0.4) + 8
        training = 0 if trained else took.get(kind, guess)
        return time.monotonic() + training + EVALUATION_SECONDS < self.program.deadline

    def run(self):
        self.prepare()
        self.learn_base()
        self.settle_profile()
        took = {}
        for job in jobs(self.arguments.seeds, self.size):
            task = job[0] in TASKS
            name = None if task else f"{self.base_name}-{run_name(*job)}"
            if not task and evaluated(self.results["runs"].get(name)):
                continue
            if not task and not (self.work / f"copied-{job[1]}.idx").exists():
                continue
            trained = not task and (self.work / name / "final").exists()
            if not self.fits(job, took, trained):
                self.say(f"no time for {job}")
                continue
            begin = time.monotonic()
            try:
                (self.fine_tune if task else self.extend)(*job)
            except SystemExit as error:  # one that fails does not take the others with it
                self.fail(f"{job}: {error}")
            if not trained:
                took[job[0] if task else (job[0] == "dense", job[1])] = time.monotonic() - begin
            self.collect(wait=False)

    def collect(self, wait=True):
        """Errors of evaluations; with `wait` all of them."""
        for future in list(self.pending):
            if wait or future.done():
                self.pending.remove(future)
                try:
                    future.result()
                except RuntimeError as error:
                    self.fail(f"an evaluation: {error}")

    def fail(self, what):
        self.say(f"FAILED {what}")
        self.results.setdefault("failed", []).append(what)


def run_name(method, length, share, seed):
    return f"{method}-{length}" + ("" if method == "dense" else f"-{round(100 * share)}") + f"-seed{seed}"


def evaluations(method):
    """What a run is evaluated on, and with which attention."""
    ways = ["dense"] if method == "dense" else ["as-trained", "dense"]
    return [(kind, way) for kind in ("held-out", "copied") for way in ways]


def loss_key(kind, way):
    return f"{kind} {way.replace('-', ' ')}"


def evaluated(entry):
    """Whether nothing is left to do for a run: it may have been stopped between its training and its evaluations."""
    return entry is not None and all(loss_key(kind, way) in entry for kind, way in evaluations(entry["method"]))


def summary(folder):
    rows = [row for row in metrics(folder) if "loss" in row]
    late = rows[len(rows) // 2:]
    found = {"steps": rows[-1]["step"], "tokens": sum(row["tokens"] for row in rows),
             "losses": [round(row["loss"], 5) for row in rows], "step_ms": [round(row["step_ms"], 2) for row in rows],
             "tokens_per_second": statistics.median(row["tokens_per_second"] for row in late)}
    for key in ("cluster_step_ms", "predicted_in_order_ms"):
        if key in rows[0]:
            found[key] = [round(row[key], 3) for row in rows]
    for key in ("density", "coverage", "predicted_bubble_percent"):
        if key in rows[-1]:
            found[key] = statistics.mean(row[key] for row in late if key in row)
    return found


def self_test():
    assert cut([10, 4, 12], 5) == [5, 5, 4, 5, 5, 2]
    assert budget_for([1000], 0.75) in range(498, 502), "half the keys are three quarters of the pairs"
    assert budget_for([1000, 100], 1.0) >= 998
    order = jobs([1, 2, 3], FULL)
    assert order[:3] == [("dense", 32768, 0.25, 1), ("fixed", 32768, 0.25, 1), ("optimal", 32768, 0.25, 1)]
    assert len(set(order)) == len(order) == 31
    assert run_name("fixed", 32768, 0.12, 2) == "fixed-32768-12-seed2"
    assert not evaluated(None)
    assert not evaluated({"method": "dense"}) and not evaluated({"method": "dense", "held-out dense": 1.0})
    assert evaluated({"method": "dense", "held-out dense": 1.0, "copied dense": 1.0})
    both = {"method": "fixed", "held-out dense": 1.0, "copied dense": 1.0, "held-out as trained": 1.0}
    assert not evaluated(both) and evaluated(dict(both, **{"copied as trained": 1.0}))
    print("self-test: passed")


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, help="default: that of the device's build")
    parser.add_argument("--data", type=pathlib.Path, help="what scripts/make-corpus.py wrote, .bin files perhaps as .bin.xz")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/extension"), help="results.json")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("runs/extension/work"), help="models and runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, help="begin nothing that would not end by then")
    parser.add_argument("--tokens", type=float, help="of an extension, in millions (20; --small: 0.05)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--profile", default=None, help="`measure` (the default), a file, or the name of a built-in one")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if arguments.data is None:
        parser.error("--data is needed: the folder that scripts/make-corpus.py wrote")
    arguments.program = arguments.program or root / f"build/{arguments.device}/src/cli/sparsebalance"
    arguments.tokens = arguments.tokens or (0.05 if arguments.small else 20)
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
