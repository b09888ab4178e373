#!/usr/bin/env python3
"""The rows of docs/results/best-layout.md: the fastest layout that fits with sequences in their original order, the fastest
ones with balancing that changes no result and with tuned budgets, by how much these are faster, and what the former gains
on its own layout.

    bench/plan/best_layout.py PROGRAM LENGTHS LONGEST --gpus 8 --global-batch 16

LENGTHS: a pool's name or a file with one length a line, cut to LONGEST tokens, which is also what a micro-batch may have.
Further options are those of `sparsebalance simulate --sweep`."""

import json
import pathlib
import subprocess
import sys
import tempfile

CASE = ["--model", "qwen2.5-3b", "--profile", "h200", "--coverage", "power:0.22", "--budget", "8192", "--steps", "40"]


def fastest(program, options, policy):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "sweep.json"
        command = [program, "simulate", "--sweep", *CASE, *options, "--policies", policy, "--json", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        layouts = json.loads(path.read_text(encoding="utf-8"))["layouts"]
    return min((row for row in layouts if row["fits"]), key=lambda row: row["makespan_ms"])


def text(row):
    ranks = " × ".join(f"{name} {row[name]}" for name in ("dp", "pp", "tp", "cp") if row[name] > 1)
    return f"{row['makespan_ms']:,.0f} ({ranks})"


def main():
    program, lengths, longest, *options = sys.argv[1:]
    options += ["--lengths", lengths, "--max-length", longest, "--micro-batch-tokens", longest]
    in_order = fastest(program, options, "in_order")
    cells = [pathlib.Path(lengths).stem, text(in_order)]
    exact, tuned = (fastest(program, options, policy) for policy in ("sab+order+chunk", "sab+order+chunk+optimal"))
    for row in (exact, tuned):
        cells += [text(row), f"{in_order['makespan_ms'] / row['makespan_ms']:.2f}"]
    print("|", " | ".join([*cells, f"{exact['speedup']:.2f}"]), "|")


if __name__ == "__main__":
    main()
