#!/usr/bin/env bash
# Set-up, build, and a first training run: a small Qwen2-shaped model learns, from scratch and on two ranks, to copy from
# anywhere in its context (examples/quickstart.yaml), and is asked for a needle in a haystack before and after. Then the
# same unequal batches are run unbalanced and balanced in turn, to show what SparseBalance is worth on this machine.
# Further arguments go to `sparsebalance train`, for example --set train.max_steps=200.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target sparsebalance bench_balance
sparsebalance=build/cpu/src/cli/sparsebalance
needle() {
  echo
  echo "== $1 the training: one needle, hidden at this depth of this many tokens, is found"
  $sparsebalance eval needle --model "$2/final" --lengths 512,1024,2048 --samples 16
}
# A step without learning saves the model as it is before the first one.
rm -rf runs/quickstart-untrained
$sparsebalance train examples/quickstart.yaml "$@" --set train.max_steps=1 --set parallel.dp=1 --set parallel.pp=1 --set parallel.cp=1 \
  --set "optimizer={learning_rate: 0, schedule: constant, warmup_steps: 0, decay_steps: 0}" \
  --set train.validation_sequences=0 --set train.output_dir=runs/quickstart-untrained >/dev/null
needle before runs/quickstart-untrained

echo
$sparsebalance train examples/quickstart.yaml --ranks 2 "$@"
needle after runs/quickstart

echo
echo "== unbalanced and balanced in turn: sequences of up to 8K tokens and more, two ranks"
rm -rf runs/quickstart-balance
build/cpu/bench/plan/bench_balance --batches 24 --policies in_order,sab+order+optimal --out runs/quickstart-balance
echo
$sparsebalance report runs/quickstart
