#!/usr/bin/env python3
"""Does balancing cost learning? The base model of recall_quality.py continues with sparse attention on chunk recall of unequal lengths (the
pool chatqa2-like divided by 4, at most 8,192 tokens), the same steps on the same data, three ways:

  one rank   fixed budget, two threads
  in order   fixed budget, two ranks of one thread, sequences as they come
  balanced   two ranks of one thread; batching sab, ordering, budgets tuned at equal mean coverage

    cmake --preset cpu && cmake --build --preset cpu --target sparsebalance
    bench/quality/convergence.py

Parts: profile (measures the machine, 20 s), train (recall before and after, by seed; allow half an hour on two cores), time
(every trained run goes on for a few steps, one way after the other; needs an idle machine; each call with --slice N adds
measurements). Finished runs under --out are not repeated."""

import argparse
import pathlib
import shutil
import statistics
import sys

from runs import metrics, run

ARMS = {
    "one rank": {"parallel.dp": 1, "train.threads": 2},
    "in order": {"parallel.dp": 2, "train.threads": 1, "balance.profile": "PROFILE"},
    "balanced": {"parallel.dp": 2, "train.threads": 1, "balance.profile": "PROFILE", "balance.batching": "sab",
                 "balance.ordering": "auto", "balance.tuning": "optimal", "balance.max_budget": 65536},
}
CONFIG = """\
model: {{ path: {start} }}
data: {{ synthetic: {{ task: chunk_recall, vocab_size: 1024, length: 8192, lengths: {lengths} }} }}
batch: {{ global_batch_size: 8, micro_batch_sequences: 1 }}
attention: {{ pattern: topk, block: 64, query_block: 4, budget: {budget}, local_blocks: 1 }}
optimizer: {{ learning_rate: 5.0e-4, betas: [0.9, 0.99], schedule: constant, warmup_steps: 10 }}
train: {{ max_steps: {steps}, save_steps: 0, log_steps: 10, validation_sequences: {validation}, tensorboard: false }}
"""


def spread(values):
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.mean(values), error


class Comparison:
    def __init__(self, arguments):
        self.arguments = arguments
        self.out = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.profile_file = self.out / "profile.json"
        self.config = self.out / "run.yaml"
        lengths = self.out / "lengths.txt"
        if not lengths.exists():
            run([arguments.binary, "data", "lengths", "--pool", "chatqa2-like", "--output", self.out / "pool.txt"],
                self.out / "lengths.log")
            pool = (self.out / "pool.txt").read_text(encoding="utf-8").splitlines()
            quarters = [max(64, int(line) // 4) for line in pool if not line.startswith("#")]
            lengths.write_text("".join(f"{length}\n" for length in quarters), encoding="utf-8")
        if not self.config.exists():
            self.config.write_text(CONFIG.format(start=arguments.start, lengths=lengths, budget=arguments.budget,
                                                 steps=arguments.steps, validation=arguments.validation), encoding="utf-8")

    def profile(self):
        if not self.profile_file.exists():
            run([self.arguments.binary, "profile", "--run", self.config, "--threads", 1, "--max-tokens", 4096, "--repeats", 3,
                 "--held-out", 6, "--out", self.profile_file], self.out / "profile.log")

    def train(self, arm, seed, directory, settings):
        values = dict(ARMS[arm], **{"train.seed": seed, "train.output_dir": directory}, **settings)
        command = [self.arguments.binary, "train", self.config]
        if values["parallel.dp"] > 1:
            command += ["--ranks", values["parallel.dp"]]
        for key, value in values.items():
            command += ["--set", f"{key}={self.profile_file if value == 'PROFILE' else value}"]
        run(command, self.out / (directory.name + ".log"))

    def directory(self, arm, seed):
        return self.out / f"{arm.replace(' ', '-')}-{seed}"

    def train_table(self):
        for seed in self.arguments.seeds:
            for arm in self.arguments.arms:
                directory = self.directory(arm, seed)
                if not (directory / "final").exists():
                    print(f"training {directory.name}", file=sys.stderr, flush=True)
                    self.train(arm, seed, directory, {})
        print(f"\nRecall after {self.arguments.steps} steps (targets of the third and later tokens of a chunk), "
              f"{self.arguments.validation} validation sequences a seed; coverage: mean of the training steps\n")
        print("| seed | before | " + " | ".join(f"{arm}: recall | loss | coverage" for arm in self.arguments.arms) + " |")
        print("| --- | --- |" + " --- | --- | --- |" * len(self.arguments.arms))
        recall = {arm: [] for arm in self.arguments.arms}
        for seed in self.arguments.seeds:
            cells, before = [], ""
            for arm in self.arguments.arms:
                rows = metrics(self.directory(arm, seed))
                checks = [row for row in rows if "validation_recall" in row]
                before = f"{100 * checks[0]['validation_recall']:.1f} %"
                recall[arm].append(100 * checks[-1]["validation_recall"])
                coverage = statistics.mean(row["coverage"] for row in rows if "coverage" in row)
                cells.append(f"{recall[arm][-1]:.2f} % | {checks[-1]['validation_loss']:.4f} | {coverage:.4f}")
            print(f"| {seed} | {before} | " + " | ".join(cells) + " |")
        base = self.arguments.arms[0]
        for arm in self.arguments.arms[1:]:
            mean, error = spread([other - own for other, own in zip(recall[arm], recall[base])])
            print(f"\n{arm} against {base}: {mean:+.2f} points of recall, standard error {error:.2f} over the seeds", end="")
        print(flush=True)

    def time_slice(self, number):
        """Copies of the trained runs go on: the same further batches, one way after the other."""
        seed = self.arguments.seeds[number % len(self.arguments.seeds)]
        for arm in self.arguments.arms:
            directory = self.out / f"time-{self.directory(arm, seed).name}-{number}"
            shutil.rmtree(directory, ignore_errors=True)
            # In order it is the same training as on one rank, so one of the two is enough.
            own = self.directory(arm, seed)
            shutil.copytree(own if (own / "final").exists() else self.directory("one rank", seed), directory)
            self.train(arm, seed, directory, {"train.max_steps": self.arguments.steps + self.arguments.time_steps,
                                              "train.validation_sequences": 0, "train.save_total_limit": 1})

    def time_table(self):
        """Steps that all ways have, without the first three after the start; of repeated ones the fastest."""
        for number in self.arguments.slice:
            self.time_slice(number)
        times, repeats = {}, 0
        for seed in self.arguments.seeds:
            for arm in self.arguments.arms:
                for directory in self.out.glob(f"time-{self.directory(arm, seed).name}-*/"):
                    repeats += 1
                    for row in metrics(directory):
                        if "step_ms" in row and 3 < row["step"] - self.arguments.steps <= self.arguments.time_steps:
                            own = times.setdefault((seed, row["step"]), {})
                            own[arm] = min(row["step_ms"], own.get(arm, row["step_ms"]))
        steps = {key: own for key, own in times.items() if len(own) == len(self.arguments.arms)}
        if not steps:
            sys.exit("nothing was measured: --slice 0 1 2 ...")
        print(f"\nMilliseconds of {len(steps)} steps that follow the {self.arguments.steps}, the same batches for all, the "
              f"fastest of {repeats / len(self.arguments.seeds) / len(self.arguments.arms):.3g} measurements each\n")
        print("How many times as fast as another way: by the sums (and the median of the steps' own ratios)\n")
        print("| | mean | by seed | against " + " | against ".join(self.arguments.arms) + " |")
        print("| --- | --- | --- |" + " --- |" * len(self.arguments.arms))
        sums = {arm: sum(own[arm] for own in steps.values()) for arm in self.arguments.arms}
        for arm in self.arguments.arms:
            seeds = [statistics.mean(own[arm] for (s, _), own in steps.items() if s == seed)
                     for seed in self.arguments.seeds if any(s == seed for s, _ in steps)]
            ratios = [(sums[other] / sums[arm], statistics.median(own[other] / own[arm] for own in steps.values()))
                      for other in self.arguments.arms]
            print(f"| {arm} | {sums[arm] / len(steps):.0f} | {', '.join(f'{value:.0f}' for value in seeds)} | "
                  + " | ".join(f"{whole:.3f} ({middle:.3f})" for whole, middle in ratios) + " |")


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=root / "build/cpu/src/cli/sparsebalance")
    parser.add_argument("--start", type=pathlib.Path, default=pathlib.Path("runs/quality/base/final"),
                        help="the model to continue; recall_quality.py trains it")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/convergence"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--validation", type=int, default=64, help="validation sequences")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--time-steps", type=int, default=11, help="steps of a measurement; the first three do not count")
    parser.add_argument("--slice", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5],
                        help="measurements to make, numbered from 0; the seeds take turns")
    parser.add_argument("--parts", nargs="+", choices=["profile", "train", "time"], default=["profile", "train", "time"])
    comparison = Comparison(parser.parse_args())
    parts = {"profile": comparison.profile, "train": comparison.train_table, "time": comparison.time_table}
    for part in comparison.arguments.parts:
        parts[part]()


if __name__ == "__main__":
    main()
