#!/usr/bin/env bash
# The tables of docs/results/simulate-paper-layouts.md: every balancing policy, simulated on the layouts of the paper, and
# what planning costs. Arguments: further files with one length a line, a table of each.
set -euo pipefail
cd "$(dirname "$0")/../.."

simulate() {
  printf '\n## %s\n\n```\n' "$1"
  shift
  build/cpu/src/cli/sparsebalance simulate --profile h200-analytic --coverage power:0.22 --comm off --head off --block 256 \
    --steps 200 --seed 1 --pp 4 "$@"
  printf '```\n'
}
simulate "One node: Qwen2.5-3B, DP2 PP4, two sequences per micro-batch, chatqa2-like" \
  --model qwen2.5-3b --dp 2 --micro-batch-sequences 2 --lengths chatqa2-like
simulate "Main: Qwen2.5-3B, DP4 PP4, one sequence a micro-batch, chatqa2-like" \
  --model qwen2.5-3b --dp 4 --micro-batch-sequences 1 --lengths chatqa2-like
simulate "Main: Qwen2.5-0.5B, chatqa2-like" --model qwen2.5-0.5b --dp 4 --micro-batch-sequences 1 --lengths chatqa2-like
simulate "Main: Qwen2.5-3B, longalign-like" --model qwen2.5-3b --dp 4 --micro-batch-sequences 1 --lengths longalign-like
simulate "Main: Qwen2.5-0.5B, longalign-like" --model qwen2.5-0.5b --dp 4 --micro-batch-sequences 1 --lengths longalign-like
for lengths in "$@"; do
  simulate "Other pools: Qwen2.5-3B, DP4 PP4, global batch 64, two a micro-batch, $(basename "$lengths" .txt)" \
    --model qwen2.5-3b --dp 4 --micro-batch-sequences 2 --global-batch 64 --lengths "$lengths" \
    --policies in_order,in_order+order,length,quadratic,wlb,sab,sab+order,sab+order+anchor:mean,sab+order+optimal
done
