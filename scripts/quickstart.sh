#!/usr/bin/env bash
# From a fresh clone to a trained model, in steps that say beforehand what they show and how long they take on two cores:
# installs what is missing, builds the program, looks at the machine, simulates a step on 8 GPUs, and trains a small
# Qwen2-shaped model to copy: within 64 tokens (examples/quickstart-short.yaml), then from anywhere in 4,096, on two ranks
# and with sparse attention (examples/quickstart.yaml). The report says what balancing gained, measured in the same run.
# Further arguments go to the second training, for example --set train.max_steps=200.
# --check PROGRAM: the same commands by a program that is built already, with few steps and in a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=runs
simulated=(--steps 200)
lengths=256,1024,4096
samples=16
short=()
check=no
if [ "${1:-}" = --check ]; then
  check=yes
  sparsebalance=$2
  runs=$(mktemp -d)
  trap 'rm -rf "$runs"' EXIT
  simulated=(--steps 2)
  lengths=256
  samples=1
  short=(--set train.max_steps=6 --set "train.output_dir=$runs/quickstart-short")
  set -- --set train.max_steps=6 --set data.synthetic.length=2048 --set attention.budget=320 --set attention.dense_below=0 \
    --set balance.compare_steps=2 --set "model.path=$runs/quickstart-short/final" --set "train.output_dir=$runs/quickstart"
fi

# step NAME TIME: what comes next.
number=0
step() {
  number=$((number + 1))
  printf '\n== %d of 7: %s (%s)\n' $number "$1" "$2"
}
build() {
  # Tests are not configured here; where they are already, they stay (leaving them out would delete what was compiled).
  local tests=OFF
  ! grep -qs '^SB_TESTS:BOOL=ON' build/cpu/CMakeCache.txt || tests=ON
  scripts/setup.sh run
  cmake --preset cpu -DSB_TESTS=$tests >/dev/null
  cmake --build --preset cpu --target sparsebalance shell_files  # shell_files: what cmake --install needs besides
  sparsebalance=build/cpu/src/cli/sparsebalance
}
needles() { "$sparsebalance" eval needle --model "$1" --lengths "$lengths" --samples "$samples"; }

step "the program is built; packages that are missing are installed first" "2 to 4 minutes"
[ $check = yes ] || build
mkdir -p "$runs"

step "what this machine has, and what is missing" "5 seconds"
"$sparsebalance" doctor

step "a step of Qwen2.5-3B on 8 GPUs, simulated: its time with each way to balance, and a picture before and after" "1 second"
"$sparsebalance" simulate --model qwen2.5-3b --profile h200 --dp 2 --pp 4 --micro-batch-sequences 2 --block 256 \
  --policies in_order,sab+order,sab+order+chunk --svg "$runs/simulated.svg" "${simulated[@]}"

step "a small model learns, from random weights, to copy within 64 tokens" "20 seconds"
rm -rf "$runs/quickstart-short"
"$sparsebalance" train examples/quickstart-short.yaml "${short[@]}"

step "how often it finds a needle that is hidden at this depth of this many tokens: not beyond what it learned" "5 seconds"
needles "$runs/quickstart-short/final"

step "two ranks teach it to copy from anywhere in 4,096 tokens, with sparse attention, in balanced steps" "1 minute"
"$sparsebalance" train examples/quickstart.yaml --ranks 2 "$@"

step "the needles again; and the report, whose first line says what balancing gained here" "5 seconds"
needles "$runs/quickstart/final"
echo
"$sparsebalance" report "$runs/quickstart"
if [ $check = yes ]; then
  # What a reader of the report is promised: sparse attention at work, and a gain that was measured.
  grep -q '× as fast</b> as the same batches in order: measured' "$runs/quickstart/report.html"
  grep -Eq '"density":0\.[0-8]' "$runs/quickstart/metrics.jsonl"
  grep -q '<svg' "$runs/simulated.svg"
  echo "quickstart: checked"
fi
