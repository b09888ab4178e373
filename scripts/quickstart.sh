#!/usr/bin/env bash
# Set-up, build, and a first training run: a small Qwen2-shaped model learns to copy within 64 tokens
# (examples/quickstart-short.yaml), then from anywhere in 4,096, on two ranks and with sparse attention
# (examples/quickstart.yaml). It is evaluated on a needle in a haystack before and after, and the report says what
# balancing gained, measured in the same run.
# Further arguments go to the second training, for example --set train.max_steps=200.
# --check PROGRAM: the same commands by a program that is built already, with few steps and in a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=runs
lengths=256,1024,4096
samples=16
short=()
if [ "${1:-}" = --check ]; then
  sparsebalance=$2
  runs=$(mktemp -d)
  trap 'rm -rf "$runs"' EXIT
  lengths=256
  samples=1
  short=(--set train.max_steps=6 --set "train.output_dir=$runs/quickstart-short")
  set -- --set train.max_steps=6 --set data.synthetic.length=2048 --set attention.budget=320 --set attention.dense_below=0 \
    --set balance.compare_steps=2 --set "model.path=$runs/quickstart-short/final" --set "train.output_dir=$runs/quickstart"
else
  scripts/setup.sh
  cmake --preset cpu >/dev/null
  cmake --build --preset cpu --target sparsebalance shell_files  # shell_files: what cmake --install needs besides
  sparsebalance=build/cpu/src/cli/sparsebalance
fi
needle() {
  echo
  echo "== $1: how often a needle is found, hidden at this depth of this many tokens"
  "$sparsebalance" eval needle --model "$2" --lengths "$lengths" --samples "$samples"
}
rm -rf "$runs/quickstart-short"
"$sparsebalance" train examples/quickstart-short.yaml "${short[@]}"
needle "trained on up to 64 tokens" "$runs/quickstart-short/final"

echo
"$sparsebalance" train examples/quickstart.yaml --ranks 2 "$@"
needle "trained on up to 4,096 tokens, with sparse attention" "$runs/quickstart/final"
echo
"$sparsebalance" report "$runs/quickstart"
if [ "$runs" != runs ]; then
  # What a reader of the report is promised: sparse attention at work, and a gain that was measured.
  grep -q '× as fast</b> as the same batches in order: measured' "$runs/quickstart/report.html"
  grep -Eq '"density":0\.[0-8]' "$runs/quickstart/metrics.jsonl"
  echo "quickstart: checked"
fi
