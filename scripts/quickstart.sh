#!/usr/bin/env bash
# Set-up, build, and a first training run: a small Qwen2-shaped model learns, from scratch and on two ranks, to copy from
# anywhere in its context (examples/quickstart.yaml). Then the same unequal batches are run unbalanced and balanced in
# turn, to show what SparseBalance is worth on this machine. Further arguments go to `sparsebalance train`, for example
# --set train.max_steps=50.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target sparsebalance bench_balance
echo
build/cpu/src/cli/sparsebalance train examples/quickstart.yaml --ranks 2 "$@"

echo
echo "== unbalanced and balanced in turn: sequences of up to 8K tokens and more, two ranks"
rm -rf runs/quickstart-balance
build/cpu/bench/balance/bench_balance --batches 24 --policies in_order,sab+order+optimal --out runs/quickstart-balance
echo
build/cpu/src/cli/sparsebalance report runs/quickstart
