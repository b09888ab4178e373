#!/usr/bin/env python3
"""What sparse attention loses on real text: a model of 27M parameters (Qwen2 shape, 8 layers, hidden 512, 8:2 heads of 64, or
--heads 16:2) learns dense at 4,096 tokens, is extended dense to 16,384, and then

  routers   gets each router in the place of dense attention without training, at 25 % and 12 % of the causal pairs: held-out
            loss minus dense loss, over all tokens and over 1,024 tokens that repeat a passage 13,000 tokens back
  train     goes on for 120 steps with dense attention and with `mass` by planes (--train-arm) at 25 %: held-out loss of both

    venv/bin/python scripts/make-corpus.py --out corpus --sources linux --text-mb 143 --vocabulary 8192 --bpe-mb 60
    bench/quality/real_text.py --data corpus --device cuda

The same command continues where it was stopped: --minutes N ends a call after so long. Results are in OUT/results.json and, as
tables, in OUT/real-text.md. --small is a tiny model for some minutes of a CPU: it shows that the script works, nothing else."""

import argparse
import json
import pathlib
import re
import sys

import token_files
from routers import ARMS, OutOfTime, Placement, Program
from runs import metrics

FULL = {"layers": 8, "hidden": 512, "intermediate": 1408, "base_length": 4096, "base_batch": 32, "micro_batch": 65536,
        "length": 16384, "batch": 8, "extend_steps": 120, "train_steps": 120, "passage": 1024, "back": 13000, "block": 128,
        "max_base_steps": None}
SMALL = {"layers": 2, "hidden": 64, "intermediate": 128, "base_length": 256, "base_batch": 8, "micro_batch": 4096,
         "length": 4096, "batch": 2, "extend_steps": 6, "train_steps": 6, "passage": 256, "back": 3200, "block": 64,
         "max_base_steps": 30}


class Experiment:
    def __init__(self, arguments):
        self.arguments, self.size = arguments, SMALL if arguments.small else FULL
        heads, kv_heads = arguments.heads
        self.out = arguments.out / f"{heads}-{kv_heads}"
        self.out.mkdir(parents=True, exist_ok=True)
        self.program = Program(arguments.program, self.out, arguments.minutes)
        self.results_file = self.out / "results.json"
        self.results = {"heads": f"{heads}:{kv_heads}", "device": arguments.device, "small": arguments.small, "routers": {},
                        "training": {}}
        if self.results_file.exists():
            self.results = json.loads(self.results_file.read_text(encoding="utf-8"))

    def save(self):
        self.results_file.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        (self.out / "real-text.md").write_text(tables(self.results), encoding="utf-8")

    def prepare(self):
        """Token files of pieces of exactly the long length: of the training part, held-out ones, and those with a passage that
        was there before."""
        length, size = self.size["length"], self.size
        self.long, self.held_out, self.copied = (self.out / name for name in ("long", "held-out", "copied"))
        if self.copied.with_suffix(".idx").exists():
            return
        pieces = list(token_files.TokenFile(self.arguments.data / "validation").pieces(length, per_document=1))
        wanted = self.arguments.sequences
        if len(pieces) < wanted:
            sys.exit(f"{self.arguments.data}/validation: {len(pieces)} documents of {length} tokens, --sequences asks for {wanted}")
        chosen = [pieces[i * len(pieces) // wanted] for i in range(wanted)]
        token_files.write(self.long, list(token_files.TokenFile(self.arguments.data / "train").pieces(length)))
        token_files.write(self.held_out, chosen)
        token_files.write(self.copied, [token_files.copied(piece, size["passage"], size["back"]) for piece in chosen],
                          (length - size["passage"], length))

    def run_file(self, model, data, length, batch, rate, train):
        optimizer = {"learning_rate": rate, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_ratio": 0.08,
                     "min_learning_rate_ratio": 0.1}
        return {"device": self.arguments.device, "model": model,
                "data": {"train": [str(data)], "max_sequence_length": length},
                "batch": {"global_batch_size": batch, "micro_batch_tokens": max(length, self.size["micro_batch"])},
                "optimizer": optimizer,
                "train": dict({"save_steps": 0, "save_total_limit": 1, "log_steps": 10, "tensorboard": False,
                               "seed": self.arguments.seed}, **train)}

    def model(self):
        size, (heads, kv_heads) = self.size, self.arguments.heads
        vocabulary = json.loads((self.arguments.data / "manifest.json").read_text(encoding="utf-8"))["vocabulary"]
        return {"init": {"model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": size["hidden"],
                         "intermediate_size": size["intermediate"], "num_hidden_layers": size["layers"],
                         "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64, "rope_theta": 500000}}

    def learn(self):
        """The dense model at the long length."""
        size = self.size
        steps = {"max_steps": size["max_base_steps"]} if size["max_base_steps"] else {"num_train_epochs": self.arguments.epochs}
        base = self.program.train("base", self.run_file(self.model(), self.arguments.data / "train", size["base_length"],
                                                        size["base_batch"], 1.5e-3, steps))
        extended = self.program.train("extended", self.run_file({"path": str(base / "final")}, self.long, size["length"],
                                                                size["batch"], 5e-4, {"max_steps": size["extend_steps"]}))
        for name, folder in (("base", base), ("extended", extended)):
            self.results["training"][name] = run_summary(folder)
        return extended / "final"

    def loss(self, model, name, attention="dense"):
        """Loss over all tokens and over the copied ones, pairs and coverage."""
        found = {}
        for kind, data in (("loss", self.held_out), ("copied", self.copied)):
            result = self.program.evaluate(["ppl", "--model", model, "--data", data, "--max-tokens", self.size["length"],
                                            "--device", self.arguments.device, "--attention", attention],
                                           self.out / "eval" / f"{name}-{kind}.json")
            found[kind] = result["rows"][-1]["loss"]
            if kind == "loss":
                found.update(density=result["density"], coverage=result["coverage"],
                             positions={row["positions"]: row["loss"] for row in result["rows"][:-1]})
        return found

    def place_routers(self, model):
        (self.out / "eval").mkdir(exist_ok=True)
        self.results["dense"] = self.loss(model, "dense")
        config = dict(self.run_file({}, self.long, self.size["length"], 2, 0.0, {}),
                      attention={"block": self.size["block"]})
        placement = Placement(self.program, model, config, self.size["length"])
        for share in self.arguments.shares:
            for arm in self.arguments.arms:
                own = self.results["routers"].setdefault(arm, {})
                if str(share) in own:
                    continue
                name = f"{re.sub('[^a-z]+', '-', arm)}-{share}"
                budget, _, folder = placement.settle(name, arm, share)
                own[str(share)] = dict(self.loss(folder / "final", name, "as-trained"), budget=budget)
                self.save()
                placement.clear(name)

    def train_on(self, model):
        """The same steps on the same data with dense attention and with the pattern."""
        arm, share = self.arguments.train_arm, self.arguments.shares[0]
        patterns = {"dense": {"pattern": "dense"}, arm: dict(ARMS[arm][0], block=self.size["block"], dense_below=0,
                                                             budget=self.results["routers"][arm][str(share)]["budget"])}
        for name, attention in patterns.items():
            run = f"continued-{re.sub('[^a-z]+', '-', name)}"
            config = self.run_file({"path": str(model)}, self.long, self.size["length"], self.size["batch"], 3e-4,
                                   {"max_steps": self.size["train_steps"], "seed": self.arguments.seed + 1})
            folder = self.program.train(run, dict(config, attention=attention))
            entry = {"run": run_summary(folder), "as_trained": self.loss(folder / "final", run, "as-trained")}
            if name != "dense":
                entry["dense"] = self.loss(folder / "final", run + "-dense")
            self.results["training"][f"continued, {name}"] = entry
            self.save()

    def run(self):
        self.prepare()
        model = self.learn()
        self.save()
        self.place_routers(model)
        self.train_on(model)


def run_summary(folder):
    rows = [row for row in metrics(folder) if "loss" in row]
    return {"steps": rows[-1]["step"], "tokens": sum(row["tokens"] for row in rows), "last_loss": rows[-1]["loss"],
            "minutes": sum(row["step_ms"] for row in rows) / 60000,
            "tokens_per_second": rows[-1]["tokens_per_second"]}


def signed(value, base):
    return f"{value - base:+.4f}"


def tables(results):
    """Markdown, as docs/results/real-text.md has it."""
    note = ", --small: shows that the script works, nothing else" if results["small"] else ""
    lines = [f"{results['heads']} heads of 64{note}"]
    for name in ("base", "extended"):
        if name in results["training"]:
            run = results["training"][name]
            lines.append(f"{name}: {run['steps']} steps, {run['tokens'] / 1e6:.1f}M tokens, {run['minutes']:.1f} minutes, "
                         f"loss of the last step {run['last_loss']:.3f}")
    if "dense" in results:
        dense = results["dense"]
        lines += ["", f"Dense: held-out loss {dense['loss']:.4f}, on copied passages {dense['copied']:.4f}. Others minus this:",
                  "", "| how blocks are judged | pairs | budget | coverage | loss | copied |",
                  "| --- | ---: | ---: | ---: | ---: | ---: |"]
        for arm, shares in results["routers"].items():
            for row in shares.values():
                coverage = "" if row["coverage"] is None else f"{100 * row['coverage']:.1f} %"
                lines.append(f"| {arm} | {100 * row['density']:.1f} % | {row['budget']} | {coverage} | "
                             f"{signed(row['loss'], dense['loss'])} | {signed(row['copied'], dense['copied'])} |")
    continued = {name: entry for name, entry in results["training"].items() if name.startswith("continued")}
    if continued:
        base = continued["continued, dense"]["as_trained"]
        lines += ["", "| trained on with | steps | held-out loss | minus dense | copied, minus dense | the same, evaluated dense |",
                  "| --- | ---: | ---: | ---: | ---: | ---: |"]
        for name, entry in continued.items():
            own = entry["as_trained"]
            lines.append(f"| {name.removeprefix('continued, ')} | {entry['run']['steps']} | {own['loss']:.4f} | "
                         f"{signed(own['loss'], base['loss'])} | {signed(own['copied'], base['copied'])} | "
                         + (signed(entry["dense"]["loss"], base["loss"]) if "dense" in entry else "") + " |")
    return "\n".join(lines) + "\n"


def self_test():
    """What the script computes by itself, on data made up for it."""
    from routers import next_budget
    import tempfile
    assert next_budget([(1000, 0.5)], 0.25) == 500
    assert next_budget([(1000, 0.5), (500, 0.3)], 0.25) == 375, "along the line"
    piece = b"".join(number.to_bytes(2, "little") for number in range(100))
    repeated = token_files.copied(piece, 10, 80)
    assert repeated[:180] == piece[:180] and repeated[180:] == piece[20:40] and len(repeated) == 200
    with tempfile.TemporaryDirectory() as folder:
        prefix = pathlib.Path(folder) / "x"
        token_files.write(prefix, [piece, piece[:60]], (5, 7))
        file = token_files.TokenFile(prefix)
        assert list(file.pieces(30)) == [piece[:60], piece[60:120], piece[120:180], piece[:60]]
        assert list(file.pieces(30, per_document=1)) == [piece[:60], piece[:60]]
        stored = prefix.with_suffix(".mask").read_bytes()
        assert stored[:8] == b"SBLABELS" and len(stored) == 32 + 8 + 24 + 13 + 4
        assert stored[64:77] == bytes([0b01100000]) + bytes(12)
    dense = {"loss": 2.0, "copied": 1.0}
    row = {"loss": 2.01, "copied": 0.9, "density": 0.25, "coverage": None, "budget": 64}
    text = tables({"heads": "8:2", "small": False, "training": {}, "dense": dense, "routers": {"window": {"0.25": row}}})
    assert "| window | 25.0 % | 64 |  | +0.0100 | -0.1000 |" in text, text
    print("self-test: passed")


def heads(text):
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found or int(found[1]) % int(found[2]) != 0:
        raise argparse.ArgumentTypeError(f"{text}: query heads and key/value heads as 8:2")
    return int(found[1]), int(found[2])


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=root / "build/cpu/src/cli/sparsebalance")
    parser.add_argument("--data", type=pathlib.Path, help="what scripts/make-corpus.py wrote")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/real-text"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, help="stop after so long; the same command goes on")
    parser.add_argument("--heads", type=heads, default=(8, 2), help="query and key/value heads, 8:2 or 16:2 for example")
    parser.add_argument("--epochs", type=float, default=2, help="passes over the training part at the short length")
    parser.add_argument("--sequences", type=int, default=16, help="held-out sequences")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.12], help="of the causal pairs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--train-arm", choices=ARMS, default="planes, mass", help="the pattern of the part `train`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if arguments.data is None:
        parser.error("--data is needed: the folder that scripts/make-corpus.py wrote")
    if arguments.train_arm not in arguments.arms:
        parser.error(f"--train-arm {arguments.train_arm!r} must be among --arms, where its budget is found")
    experiment = Experiment(arguments)
    try:
        experiment.run()
    except OutOfTime:
        print("time is up; the same command goes on", file=sys.stderr)
        experiment.save()
    print(tables(experiment.results))


if __name__ == "__main__":
    main()
