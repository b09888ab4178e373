#!/usr/bin/env python3
"""The rows of docs/results/best-layout.md: the fastest layout that fits with sequences in their original order, with the
paper's policy, with balancing that changes no result and with tuned budgets; by how much these are faster, each on its own
best layout; and what the last gains on the layout that is best in order, as papers compare. Last, how much longer its best
step takes than the best one of any layout would without communication.

    bench/plan/best_layout.py PROGRAM LENGTHS LONGEST --gpus 8 --global-batch 16

LENGTHS: a pool's name or a file with one length a line, cut to LONGEST tokens, which is also what a micro-batch may have; a
sweep also tries twice and four times as much. Further options are those of `sparsebalance simulate --sweep`."""

import json
import pathlib
import subprocess
import sys
import tempfile

CASE = ["--model", "qwen2.5-3b", "--profile", "h200", "--coverage", "power:0.22", "--budget", "8192", "--steps", "40"]
IN_ORDER, PAPER, EXACT, TUNED = "in_order", "sab+anchor:mean", "sab+order+chunk", "sab+order+chunk+optimal"


def sweep(program, options, *policies):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "sweep.json"
        command = [program, "simulate", "--sweep", *CASE, *options, "--policies", ",".join(policies), "--json", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [row for row in json.loads(path.read_text(encoding="utf-8"))["layouts"] if row["fits"]]


def fastest(rows, policy):
    return min((row for row in rows if row["policy"] == policy), key=lambda row: row["makespan_ms"])


def place(row):
    return [row[name] for name in ("dp", "pp", "tp", "cp", "micro_batch_tokens")]


def text(row, longest):
    ranks = " × ".join(f"{name} {row[name]}" for name in ("dp", "pp", "tp", "cp") if row[name] > 1)
    times = row["micro_batch_tokens"] // longest
    return f"{row['makespan_ms']:,.0f} ({ranks}{f'; micro-batch × {times}' if times > 1 else ''})"


def main():
    program, lengths, longest, *options = sys.argv[1:]
    options += ["--lengths", lengths, "--max-length", longest, "--micro-batch-tokens", longest]
    rows = sweep(program, options, IN_ORDER, PAPER, EXACT, TUNED)
    in_order, tuned = fastest(rows, IN_ORDER), fastest(rows, TUNED)
    cells = [pathlib.Path(lengths).stem, text(in_order, int(longest))]
    for policy in (PAPER, EXACT, TUNED):
        row = fastest(rows, policy)
        cells += [text(row, int(longest)), f"{in_order['makespan_ms'] / row['makespan_ms']:.2f}"]
    same = [row for row in rows if row["policy"] == TUNED and place(row) == place(in_order)]
    cells.append(f"{in_order['makespan_ms'] / same[0]['makespan_ms']:.2f}" if same else "-")
    free = fastest(sweep(program, [*options, "--comm", "off"], IN_ORDER, TUNED), TUNED)
    cells.append(f"{tuned['makespan_ms'] / free['makespan_ms']:.2f} of {text(free, int(longest))}")
    print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
