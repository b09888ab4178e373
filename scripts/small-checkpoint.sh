#!/usr/bin/env bash
# A small checkpoint with a tokenizer (bytes) and token files, for trying examples/continue.yaml without downloading
# anything: checkpoints/small (a Qwen2-shaped model, randomly initialised) and data/small (RULER's needle tasks as text).
set -euo pipefail
cd "$(dirname "$0")/.."
sparsebalance=${SPARSEBALANCE:-build/cpu/src/cli/sparsebalance}
[[ -x $sparsebalance ]] || { echo "$sparsebalance is not there; run scripts/quickstart.sh, or cmake --preset cpu and cmake --build --preset cpu" >&2; exit 2; }

rm -rf checkpoints/small checkpoints/small-run data/small.*
mkdir -p checkpoints data
$sparsebalance --log-level warning train examples/small/init.yaml --set train.resume=never >/dev/null
mv checkpoints/small-run/final checkpoints/small
rm -rf checkpoints/small-run
cp examples/small/tokenizer.json checkpoints/small/
$sparsebalance data synth --text --task niah_single --length 2048 --sequences 128 --tokenizer examples/small/tokenizer.json \
  --overwrite --output data/small.jsonl
$sparsebalance data tokenize --tokenizer checkpoints/small --input data/small.jsonl --text-key input --append-eod --output data/small
