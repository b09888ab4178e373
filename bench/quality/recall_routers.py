#!/usr/bin/env python3
"""Routers without training on chunk recall: a small model (2 layers, 8:2 heads of 64) learns dense, by a curriculum, to copy from
anywhere in 8,192 tokens. Every router is then put in its place at 22 % of the causal pairs, and recall is measured; then, after
some dense steps that teach the form of the question, a lone needle at eight depths. By seed and heads:

    bench/quality/recall_routers.py --device cuda --heads 8:2 16:2 --seeds 1 2 3

The same command continues where it was stopped: --minutes N ends a call after so long. Results are in OUT/results.json and, as
tables, in OUT/recall-routers.md. --small is for some minutes of a CPU: it shows that the script works."""

import argparse
import json
import pathlib
import re
import statistics
import sys

from real_text import heads
from routers import ARMS, OutOfTime, Placement, Program
from runs import metrics

DEFAULT_ARMS = ["window", "moments of whole blocks, topk", "exact scores, topk", "planes, topk", "planes, mass"]
DEPTHS = [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875]
FULL = {"length": 8192, "short_length": 256, "short_steps": 1200, "short_batch": 256, "steps": 400, "batch": 16,
        "micro_batch": 65536, "needle_steps": 40, "needles": 64, "validation": 16, "samples": 25}
SMALL = {"length": 1024, "short_length": 64, "short_steps": 8, "short_batch": 8, "steps": 8, "batch": 4, "micro_batch": 4096,
         "needle_steps": 6, "needles": 8, "validation": 4, "samples": 3}


class Study:
    """One seed and head count."""

    def __init__(self, arguments, head_counts, seed, results, save):
        self.arguments, self.heads, self.seed, self.results, self.save = arguments, head_counts, seed, results, save
        self.size = SMALL if arguments.small else FULL
        self.name = f"{head_counts[0]}-{head_counts[1]}-seed-{seed}"
        self.program = Program(arguments.program, arguments.out / self.name, None)
        self.program.deadline = arguments.deadline

    def config(self, model, task, batch, optimizer, steps, validation):
        return {"device": self.arguments.device, "model": model, "data": {"synthetic": dict({"vocab_size": 1024}, **task)},
                "batch": {"global_batch_size": batch, "micro_batch_tokens": max(self.size["length"], self.size["micro_batch"])},
                "optimizer": dict({"betas": [0.9, 0.99]}, **optimizer), "attention": {"block": 64},
                "train": {"max_steps": steps, "save_steps": 0, "save_total_limit": 1, "log_steps": 25, "tensorboard": False,
                          "seed": self.seed, "validation_sequences": validation}}

    def base(self):
        """Dense: to copy at all is learned from many short sequences, to reach far from few long ones."""
        size = self.size
        init = {"model_type": "qwen2", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
                "num_attention_heads": self.heads[0], "num_key_value_heads": self.heads[1], "head_dim": 64, "rope_theta": 500000,
                "initializer_range": 0.06}
        model = {"init": init}
        for name, first, length, batch, rate, steps in (
                ("short", 24, size["short_length"], size["short_batch"], 1.5e-3, size["short_steps"]),
                ("base", size["short_length"], size["length"], size["batch"], 1e-3, size["steps"])):
            task = {"task": "chunk_recall", "length": length,
                    "curriculum": {"start_length": first, "threshold": 0.8, "smoothing": 0.8}}
            optimizer = {"learning_rate": rate, "schedule": "warmup_stable_decay", "warmup_steps": min(20, steps // 4),
                         "decay_steps": steps // 4}
            folder = self.program.train(name, self.config(model, task, batch, optimizer, steps, size["validation"]))
            model = {"path": str(folder / "final")}
        return folder

    def needle(self, base):
        """Dense attention learns the form of the question; a router then only has to find the place."""
        size = self.size
        optimizer = {"learning_rate": 5e-4, "schedule": "warmup_stable_decay", "warmup_steps": min(5, size["needle_steps"] // 2),
                     "decay_steps": size["needle_steps"] // 2}
        return self.program.train("needle", self.config({"path": str(base / "final")}, self.needle_task(), 4, optimizer,
                                                        size["needle_steps"], size["validation"]))

    def needle_task(self):
        return {"task": "needle_multi_query", "length": self.size["length"], "needles": self.size["needles"],
                "queries": self.size["needles"] // 2}

    def found(self, model, name, attention):
        result = self.program.evaluate(
            ["needle", "--model", model, "--attention", attention, "--lengths", self.size["length"], "--depths",
             ",".join(map(str, DEPTHS)), "--samples", self.size["samples"], "--max-tokens", self.size["length"], "--device",
             self.arguments.device, "--seed", 100 + self.seed], self.program.out / f"needle-{name}.json")
        return {"depths": [row[0] for row in result["values"]], "mean": result["mean"]}

    def place(self, task, model, arm, name, guess):
        config = self.config({}, task, 2, {}, 1, self.size["validation"])
        config["train"]["seed"] = 50 + self.seed
        placement = Placement(self.program, model, config, self.size["length"])
        budget, density, folder = placement.settle(name, arm, self.arguments.share, guess)
        return placement, budget, density, folder

    def run(self, budgets):
        base = self.base()
        needle = self.needle(base)
        recall_task = {"task": "chunk_recall", "length": self.size["length"]}
        if "dense" not in self.results:
            # What is to be lost must be there first.
            if not self.arguments.small and last(base, "validation_recall") < 0.95:
                sys.exit(f"{base}: dense recall is {100 * last(base, 'validation_recall'):.1f} %; the task was not learned. "
                         f"Another seed, or more steps, may")
            self.results["dense"] = {"density": 1.0, "recall": last(base, "validation_recall"),
                                     "needle": self.found(needle / "final", "dense", "dense")}
            self.save()
        for arm in self.arguments.arms:
            if arm in self.results:
                continue
            name = re.sub("[^a-z]+", "-", arm)
            recall, budget, density, folder = self.place(recall_task, base / "final", arm, f"recall-{name}", budgets.get(arm))
            # What one seed settled is where the next one starts.
            budgets[arm] = budget
            needles, _, needle_density, questions = self.place(self.needle_task(), needle / "final", arm, f"needle-{name}", budget)
            self.results[arm] = {"density": density, "budget": budget, "recall": last(folder, "validation_recall"),
                                 "needle_density": needle_density,
                                 "needle": self.found(questions / "final", name, "as-trained")}
            self.save()
            recall.clear(f"recall-{name}")
            needles.clear(f"needle-{name}")


def last(folder, key):
    return [row[key] for row in metrics(folder) if key in row][-1]


def tables(results, small):
    lines = ["--small: shows that the script works, nothing else"] if small else []
    shapes = {}
    for name, arms in results.items():
        shape, seed = name.split("-seed-")
        for arm, row in arms.items():
            shapes.setdefault(shape, {}).setdefault(arm, {})[seed] = row
    for shape, arms in shapes.items():
        lines += ["", f"{shape.replace('-', ':')} heads of 64", "",
                  "| how blocks are judged | pairs | recall by seed | needle by seed | needle at depth "
                  + ", ".join(map(str, DEPTHS)) + " |",
                  "| --- | ---: | --- | --- | --- |"]
        for arm, seeds in arms.items():
            percent = lambda values: ", ".join(f"{100 * value:.1f}" for value in values)
            depths = [statistics.mean(row["needle"]["depths"][i] for row in seeds.values()) for i in range(len(DEPTHS))]
            pairs = statistics.mean(row["density"] for row in seeds.values())
            lines.append(f"| {arm} | {100 * pairs:.1f} % | {percent(row['recall'] for row in seeds.values())} | "
                         f"{percent(row['needle']['mean'] for row in seeds.values())} | {percent(depths)} |")
    return "\n".join(lines) + "\n"


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=root / "build/cpu/src/cli/sparsebalance")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/recall-routers"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    parser.add_argument("--heads", type=heads, nargs="+", default=[(8, 2), (16, 2)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--share", type=float, default=0.22, help="of the causal pairs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    arguments.deadline = Program(arguments.program, arguments.out, arguments.minutes).deadline
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def save():
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (arguments.out / "recall-routers.md").write_text(tables(results, arguments.small), encoding="utf-8")

    try:
        for head_counts in arguments.heads:
            budgets = {}
            for seed in arguments.seeds:
                study = Study(arguments, head_counts, seed, {}, save)
                study.results = results.setdefault(study.name, {})
                for arm, row in study.results.items():
                    if "budget" in row:
                        budgets[arm] = row["budget"]
                study.run(budgets)
    except OutOfTime:
        print("time is up; the same command goes on", file=sys.stderr)
    save()
    print(tables(results, arguments.small))


if __name__ == "__main__":
    main()
