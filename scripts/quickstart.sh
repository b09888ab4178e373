#!/usr/bin/env bash
# Set-up, build, and a first training run: a small Qwen2-shaped model learns to copy within 64 tokens
# (examples/quickstart-short.yaml), then from anywhere in 4,096, on two ranks and with sparse attention
# (examples/quickstart.yaml). It is evaluated on a needle in a haystack before and after, and the report says what
# balancing gained, measured in the same run.
# Further arguments go to the second training, for example --set train.max_steps=200.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target sparsebalance
sparsebalance=build/cpu/src/cli/sparsebalance
needle() {
  echo
  echo "== $1: how often a needle is found, hidden at this depth of this many tokens"
  $sparsebalance eval needle --model "$2" --lengths 256,1024,4096 --samples 16
}
rm -rf runs/quickstart-short
$sparsebalance train examples/quickstart-short.yaml
needle "trained on up to 64 tokens" runs/quickstart-short/final

echo
$sparsebalance train examples/quickstart.yaml --ranks 2 "$@"
needle "trained on up to 4,096 tokens, with sparse attention" runs/quickstart/final
echo
$sparsebalance report runs/quickstart
