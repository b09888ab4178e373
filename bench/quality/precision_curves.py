#!/usr/bin/env python3
"""Does train.precision: fp8 cost a model anything? The base of extension.py (27M parameters: Qwen2 shape, 8 layers, hidden 512,
8:2 heads of 64) learns one pass of a corpus at 4,096 tokens, in bfloat16 and in fp8, from the same values over the same batches,
for every seed. Printed: the losses over the last tenth of the steps and on held-out text, and their differences; curves go into
OUT/fp8-curves.svg. Fails where a held-out loss differs by more than 0.5 %.

    bench/quality/precision_curves.py --program build/cuda/sparsebalance --data corpus --out results [--seeds 1 2] [--skip first last]

--data: a folder of scripts/make-corpus.py."""

import argparse
import json
import pathlib
import statistics
import sys

import svg_lines
from runs import metrics, run

MOST = 0.005
LENGTH, BATCH, MICRO_BATCH = 4096, 32, 65536
SHAPE = {"model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 500000, "max_position_embeddings": LENGTH}


def train(arguments, precision, seed):
    vocabulary = json.loads((arguments.data / "manifest.json").read_text(encoding="utf-8"))["vocabulary"]
    folder = arguments.out / f"{precision}-{seed}"
    steps = {"max_steps": arguments.steps} if arguments.steps else {"num_train_epochs": 1}
    skipped = {"fp8_skip": arguments.skip} if precision == "fp8" and arguments.skip else {}
    config = {"device": "cuda", "model": {"init": dict(SHAPE, vocab_size=vocabulary)},
              "data": {"train": [str(arguments.data / "train")], "validation": [str(arguments.data / "validation")],
                       "max_sequence_length": LENGTH},
              "batch": {"global_batch_size": BATCH, "micro_batch_tokens": MICRO_BATCH},
              "optimizer": {"learning_rate": 1.5e-3, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_ratio": 0.08,
                            "min_learning_rate_ratio": 0.1},
              "train": dict({"precision": precision, "seed": seed, "recompute": "none", "save_steps": 0, "log_steps": 50,
                             "validation_sequences": 0, "tensorboard": False, "resume": "never", "output_dir": str(folder)},
                            **steps, **skipped)}
    file = arguments.out / f"{precision}-{seed}.yaml"
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    run([arguments.program, "train", file], arguments.out / f"{precision}-{seed}.log")
    rows = metrics(folder)
    steps = [row for row in rows if "loss" in row]
    held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
    losses = [row["loss"] for row in steps]
    return {"losses": losses, "last": statistics.mean(losses[-max(1, len(losses) // 10):]), "held_out": held_out[-1],
            "tokens": sum(row["tokens"] for row in steps),
            "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps[len(steps) // 2:])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("build/cuda/sparsebalance"))
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=0, help="0: one pass over the data")
    parser.add_argument("--skip", nargs="*", default=[], help="train.fp8_skip")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results, lines, worst = {}, [], 0.0
    for seed in arguments.seeds:
        for precision in ("auto", "fp8"):
            result = results[f"{precision}-{seed}"] = train(arguments, precision, seed)
            print(f"seed {seed}, {precision}: {result['tokens'] / 1e6:.1f}M tokens, last tenth {result['last']:.4f}, held-out "
                  f"{result['held_out']:.4f}, {result['tokens_per_second']:,.0f} tokens/s", flush=True)
            width = max(1, len(result["losses"]) // 20)
            name = f"{'bf16' if precision == 'auto' else 'fp8'}, seed {seed}"
            lines.append((name, [(width + i, loss) for i, loss in enumerate(svg_lines.smoothed(result["losses"], width))]))
        bf16, fp8 = results[f"auto-{seed}"], results[f"fp8-{seed}"]
        difference = fp8["held_out"] / bf16["held_out"] - 1
        worst = max(worst, abs(difference))
        print(f"seed {seed}: fp8 against bf16: last tenth {fp8['last'] / bf16['last'] - 1:+.3%}, held-out {difference:+.3%}")
    (arguments.out / "precision.json").write_text(json.dumps(results), encoding="utf-8")
    (arguments.out / "fp8-curves.svg").write_text(svg_lines.chart("27M parameters, bf16 and fp8", "step", "loss", lines),
                                                  encoding="utf-8")
    if worst > MOST:
        sys.exit(f"a held-out loss differs by {worst:.2%}, more than {MOST:.1%}")


if __name__ == "__main__":
    main()
