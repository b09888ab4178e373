"""Routers put in the place of dense attention without training the model: what real_text.py and recall_routers.py share.

Selection learns something of its own between steps (thresholds of `mass`, planes of `score: planes`). It does so here in a few
steps of training at a learning rate of 0, on training data: the weights stay equal to the bit, which is checked."""

import filecmp
import json
import shutil
import statistics
import subprocess
import sys
import time

from runs import metrics

# Options of the attention section, and by how much more than the keys of an exact window the budget must be, a first guess: the
# staircase of `topk` reads less, because early tokens of a query block do not see what later ones add.
ARMS = {
    "window": ({"pattern": "window"}, 1.05),
    "exact scores, topk": ({"pattern": "topk", "score": "moments", "score_tokens": 1}, 1.28),
    "exact scores, mass": ({"pattern": "mass", "score": "moments", "score_tokens": 1}, 1.06),
    "moments of whole blocks, topk": ({"pattern": "topk", "score": "moments"}, 1.28),
    "look-ahead block means, topk": ({"pattern": "topk", "selection": "lookahead", "score": "mean"}, 1.06),
    "planes, topk": ({"pattern": "topk", "score": "planes", "score_channels": 32}, 1.28),
    "planes, mass": ({"pattern": "mass", "score": "planes", "score_channels": 32}, 1.06),
}


class OutOfTime(Exception):
    """The minutes of this call are over; what is finished stays."""


class Program:
    """Runs `sparsebalance` until its work is done or the time is up. A training run that is stopped saves a checkpoint, and
    the same run continues from it in the next call."""

    def __init__(self, path, out, minutes):
        self.path, self.out = path, out
        self.deadline = time.monotonic() + 60 * minutes if minutes else None

    def run(self, words, log):
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left < 5:
            raise OutOfTime
        command = [str(word) for word in (self.path, *words)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(120)
                raise OutOfTime from None
        if code != 0:
            sys.exit(f"{' '.join(command)}\nfailed, {log}:\n" + log.read_text(encoding="utf-8", errors="replace")[-3000:])

    def train(self, name, config):
        """A run under `out`, unless it is finished; returns its folder. `config` is a run.yaml as a dictionary."""
        folder = self.out / name
        if not (folder / "final").exists():
            print(f"training {name}", file=sys.stderr, flush=True)
            config = dict(config, train=dict(config["train"], output_dir=str(folder)))
            file = self.out / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
            self.run(["train", file], self.out / f"{name}.log")
        return folder

    def evaluate(self, words, result):
        """What an `eval` command writes with --json; a finished one is not repeated."""
        if not result.exists():
            self.run(["eval", *words, "--json", result], result.with_suffix(".log"))
        return json.loads(result.read_text(encoding="utf-8"))


def same_weights(one, other):
    return filecmp.cmp(one / "model.safetensors", other / "model.safetensors", shallow=False)


def mean_density(folder):
    """Of the last third of a run's steps: by then selection has learned."""
    found = [row["density"] for row in metrics(folder) if "density" in row]
    return statistics.mean(found[-max(1, len(found) // 3):])


def next_budget(tried, share):
    """From (budget, density) pairs: proportional at first, then along the line through the two nearest to the wanted share."""
    nearest = sorted(tried, key=lambda one: abs(one[1] - share))
    budget, density = nearest[0]
    if len(nearest) > 1 and nearest[1][1] != density and nearest[1][0] != budget:
        slope = (nearest[1][1] - density) / (nearest[1][0] - budget)
        if slope > 0:
            return max(1, round(budget + (share - density) / slope))
    return max(1, round(budget * share / density))


class Placement:
    """Routers in a trained model, at a share of the causal pairs."""

    def __init__(self, program, model, config, length):
        """`config`: a run.yaml with the data of the calibration; `model`: the trained one."""
        self.program, self.model, self.config, self.length = program, model, config, length

    def attention(self, arm, budget):
        return dict(self.config.get("attention", {}), **ARMS[arm][0], budget=budget, dense_below=0)

    def calibrate(self, name, arm, budget):
        """A run that changes nothing but what selection learns."""
        steps = 16 if ARMS[arm][0]["pattern"] == "mass" else 4
        config = dict(self.config, model={"path": str(self.model)}, attention=self.attention(arm, budget),
                      optimizer={"learning_rate": 0.0, "schedule": "constant"},
                      train=dict(self.config["train"], max_steps=steps, save_steps=0, save_total_limit=1, log_steps=steps))
        folder = self.program.train(name, config)
        if not same_weights(folder / "final", self.model):
            sys.exit(f"{folder}: a learning rate of 0 changed the weights, so this is not the model without training")
        return folder

    def settle(self, name, arm, share, guess=None, tolerance=0.02, tries=4):
        """(budget, density, folder) of a calibrated run whose pairs are the wanted share as nearly as four tries get it."""
        # A window of b keys reads b - b²/2n keys of a sequence of n on average, a share of n/2.
        budget = guess or round(ARMS[arm][1] * self.length * (1 - (1 - share) ** 0.5))
        tried, folders = [], {}
        while len(tried) < tries and budget not in folders:
            folders[budget] = self.calibrate(f"{name}-{budget}", arm, budget)
            tried.append((budget, mean_density(folders[budget])))
            if abs(tried[-1][1] / share - 1) <= tolerance:
                break
            budget = next_budget(tried, share)
        best = min(tried, key=lambda one: abs(one[1] - share))
        return (*best, folders[best[0]])

    def clear(self, name):
        """Removes what settle() left under this name, once it was evaluated: each try holds the whole model."""
        for folder in self.program.out.glob(f"{name}-*/"):
            shutil.rmtree(folder)
