#!/usr/bin/env bash
# Sequences in pieces by the clock: two MPI ranks of one thread each, pp 2, lengths chatqa2-like / 4, budget 2048, pieces
# of 1024 tokens, against whole sequences in order and balanced, in turns over the same batches. Exit code 1 unless
# pieces are 1.30 times as fast as in order at a global batch of 2, 1.04 times as fast as sab+order at one of 8, and both
# within 10 % of what the simulator says. About 3 minutes on two cores with nothing else on them.
#   bench/plan/chunks_by_clock.sh [DIRECTORY] [batches of 2] [batches of 8]
set -uo pipefail
bench="$(dirname "$0")/../../build/dev/bench/plan/bench_balance"
out=${1:-chunks_by_clock.out}
mkdir -p "$out"
code=0
"$bench" --pp --chunk 1024 --global-batch 2 --batches "${2:-68}" --at-least in_order:1.30 \
  --profile "$out/profile.json" --out "$out/batch-2" || code=1
"$bench" --pp --chunk 1024 --global-batch 8 --batches "${3:-32}" --at-least sab+order:1.04 \
  --profile "$out/profile.json" --out "$out/batch-8" || code=1
exit $code
