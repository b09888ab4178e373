#!/usr/bin/env bash
# Set-up, build, and a first training run: a small Qwen2-shaped model learns, from scratch, to copy from anywhere in its
# context (examples/quickstart.yaml). Further arguments go to `sparsebalance train`, for example --set train.max_steps=50.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target sparsebalance
echo
build/cpu/src/cli/sparsebalance train examples/quickstart.yaml "$@"
