#!/usr/bin/env python3
"""What sparse attention costs in quality and saves in time, on chunk recall: one model, trained dense (recall.yaml) and then
taken to long sequences with dense attention, goes on for the same number of steps under each pattern.

    cmake --preset dev && cmake --build --preset dev --target sparsebalance bench_coverage
    bench/quality/recall_quality.py

trains all of it (allow an hour on two cores), measures and prints the tables in Markdown. Finished runs under --out are not
repeated. --parts chooses: train (accuracy and coverage), needle, time (seconds a step; needs an idle machine), coverage."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from runs import metrics, run

# One row each: options of the attention section besides the block. The staircase computes fewer pairs than whole lists of the
# same budget, because early tokens of a query block do not see what later ones add: `budget_factor` makes the pairs equal
# (bench_coverage finds it; the tables show the pairs).
CAUSAL = {"pattern": "topk", "selection": "causal", "score": "moments"}
LOOKAHEAD = {"pattern": "topk", "selection": "lookahead", "score": "mean"}
PATTERNS = {
    "dense": {"pattern": "dense"},
    "window": {"pattern": "window"},
    "topk causal, moments, query block 1": dict(CAUSAL, query_block=1),
    "topk causal, moments, query block 2": dict(CAUSAL, query_block=2, budget_factor=1.016),
    "topk causal, moments, query block 4": dict(CAUSAL, query_block=4, budget_factor=1.046),
    "topk causal, moments, query block 16": dict(CAUSAL, query_block=16, budget_factor=1.22),
    "topk causal, moments, query block 2, score_tokens 1": dict(CAUSAL, query_block=2, budget_factor=1.016, score_tokens=1),
    "topk causal, moments, query block 16, score_tokens 1": dict(CAUSAL, query_block=16, budget_factor=1.22, score_tokens=1),
    "topk causal, moments, query block 16, score_tokens 4": dict(CAUSAL, query_block=16, budget_factor=1.22, score_tokens=4),
    "topk look-ahead, mean, query block 16, score_tokens 1": dict(LOOKAHEAD, query_block=16, score_tokens=1),
    "topk look-ahead, mean, query block 16": dict(LOOKAHEAD, query_block=16),
    "topk look-ahead, mean, query block 128": dict(LOOKAHEAD, query_block=128, budget_factor=1.015),
}


class Study:
    def __init__(self, arguments):
        self.arguments = arguments
        self.out = arguments.out

    def train(self, name, settings, config="bench/quality/recall.yaml"):
        """A run under --out, unless it is there already; returns its directory."""
        directory = self.out / name
        if not (directory / "final").exists():
            print(f"training {name}", file=sys.stderr, flush=True)
            values = dict(settings, **{"train.output_dir": directory, "train.threads": self.arguments.threads,
                                         "parallel.dp": 1})
            command = [self.arguments.binary, "train", config]
            for key, value in values.items():
                command += ["--set", f"{key}={value}"]
            log = self.out / f"{name}.log"
            run(command, log)
            if not (directory / "final").exists():
                sys.exit(f"{name} was stopped before its end ({log}); the same command goes on with it")
        return directory

    def attention(self, pattern):
        options = dict(PATTERNS[pattern], block=64)
        options["budget"] = round(self.arguments.budget * options.pop("budget_factor", 1.0))
        return "{" + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}"

    def continued(self, base, length, steps, batch, start=None):
        """Settings to go on from another run's model on sequences of this length."""
        curriculum = "null" if start is None else f"{{start_length: {start}, threshold: 0.85, smoothing: 0.8}}"
        return {
            "model.init": "null", "model.path": base / "final", "data.synthetic.length": length,
            "data.synthetic.curriculum": curriculum, "batch.global_batch_size": batch, "batch.micro_batch_tokens": length,
            "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 10, "optimizer.decay_steps": steps // 3,
            "train.max_steps": steps, "train.validation_sequences": self.arguments.validation, "train.log_steps": 10,
            "train.seed": 11,
        }

    def long_base(self):
        base = self.train("base", {})
        length = self.arguments.length
        return self.train("long", self.continued(base, length, self.arguments.lengthening_steps, 2, start=min(4096, length)))

    def pattern_run(self, pattern):
        settings = self.continued(self.long_base(), self.arguments.length, self.arguments.steps, 1)
        settings["attention"] = self.attention(pattern)
        return self.train(pattern.replace(",", "").replace(" ", "_"), settings)

    def train_table(self):
        print(f"\nChunk recall at {self.arguments.length} tokens, budget {self.arguments.budget}, {self.arguments.steps} steps "
              f"from the same dense model\n")
        print("| attention | pairs | attention kept | recall before | recall after | all targets |")
        print("| --- | --- | --- | --- | --- | --- |")
        for pattern in self.arguments.patterns:
            rows = metrics(self.pattern_run(pattern))
            steps = [row for row in rows if "loss" in row][-10:]
            checks = [row for row in rows if "validation_recall" in row]
            share = lambda key: f"{100 * statistics.mean(row.get(key, 1.0) for row in steps):.1f} %"
            percent = lambda row, key: f"{100 * row[key]:.1f} %"
            print(f"| {pattern} | {share('density')} | {share('coverage')} | {percent(checks[0], 'validation_recall')} | "
                  f"{percent(checks[-1], 'validation_recall')} | {percent(checks[-1], 'validation_accuracy')} |", flush=True)

    def needle_table(self):
        """Dense attention learns the form of the question in a few steps; the patterns then only have to find the place."""
        length = self.arguments.length
        settings = self.continued(self.pattern_run("dense"), length, 16, 1)
        settings.update({"data.synthetic.task": "needle_multi_query", "data.synthetic.needles": 64,
                         "data.synthetic.queries": 32, "optimizer.learning_rate": 5e-4, "optimizer.warmup_steps": 5,
                         "optimizer.decay_steps": 8, "train.seed": 21})
        model = self.train("needle", settings) / "final"
        depths = [0.0, 0.25, 0.5, 0.75]
        print(f"\nOne needle in {length} tokens, {self.arguments.needles} samples a depth\n")
        print("| attention | " + " | ".join(f"depth {depth}" for depth in depths) + " | all |")
        print("| --- |" + " --- |" * (len(depths) + 1))
        for pattern in self.arguments.patterns:
            name = pattern.replace(",", "").replace(" ", "_")
            result, config = self.out / f"needle_{name}.json", self.out / f"needle_{name}.yaml"
            if not result.exists():
                config.write_text(f"model: {{path: {model}}}\ndata: {{synthetic: {{length: {length}}}}}\n"
                                  f"attention: {self.attention(pattern)}\n", encoding="utf-8")
                run([self.arguments.binary, "eval", "needle", "--model", model, "--attention", "as-trained", "--run-config",
                     config, "--lengths", length, "--depths", ",".join(map(str, depths)), "--samples",
                     self.arguments.needles, "--max-tokens", length, "--threads", self.arguments.threads, "--json", result],
                    self.out / f"needle_{name}.log")
            found = json.loads(result.read_text(encoding="utf-8"))
            cells = [f"{100 * row[0]:.0f} %" for row in found["values"]] + [f"{100 * found['mean']:.0f} %"]
            print(f"| {pattern} | " + " | ".join(cells) + " |", flush=True)

    def time_table(self):
        print(f"\nSeconds a training step, one sequence, budget {self.arguments.budget}, the fastest of three\n")
        lengths = self.arguments.time_lengths
        print("| attention | " + " | ".join(f"{length} tokens | against dense" for length in lengths) + " |")
        print("| --- |" + " --- |" * 2 * len(lengths))
        dense = {}
        for pattern in self.arguments.patterns:
            cells = []
            for length in lengths:
                settings = self.continued(self.long_base(), length, 3, 1)
                settings.update({"attention": self.attention(pattern), "attention.coverage_rows": 0,
                                 "optimizer.warmup_steps": 0, "train.validation_sequences": 0, "train.resume": "never"})
                directory = self.train(f"time_{length}_" + pattern.replace(",", "").replace(" ", "_"), settings)
                seconds = min(row["step_ms"] for row in metrics(directory) if "step_ms" in row) / 1000
                dense.setdefault(length, seconds)
                cells += [f"{seconds:.2f}", f"{dense[length] / seconds:.2f} times"]
            print(f"| {pattern} | " + " | ".join(cells) + " |", flush=True)

    def coverage_tables(self):
        for base, tokens, budget in ((self.train("base", {}), 2048, 512),
                                     (self.long_base(), self.arguments.length, self.arguments.budget)):
            print(flush=True)
            subprocess.run([self.arguments.coverage_binary, base / "final", str(tokens), str(budget)], check=True)


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=root / "build/cpu/src/cli/sparsebalance")
    parser.add_argument("--coverage-binary", default=root / "build/dev/bench/quality/bench_coverage")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/quality"))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=2048, help="keys a query")
    parser.add_argument("--steps", type=int, default=120, help="steps of one sequence under each pattern")
    parser.add_argument("--lengthening-steps", type=int, default=45, help="dense steps from the base model's length to --length")
    parser.add_argument("--validation", type=int, default=8, help="validation sequences")
    parser.add_argument("--needles", type=int, default=25, help="samples a depth")
    parser.add_argument("--time-lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--parts", nargs="+", choices=["train", "needle", "time", "coverage"],
                        default=["train", "needle", "time", "coverage"])
    study = Study(parser.parse_args())
    tables = {"train": study.train_table, "needle": study.needle_table, "time": study.time_table,
              "coverage": study.coverage_tables}
    for part in study.arguments.parts:
        tables[part]()


if __name__ == "__main__":
    main()
