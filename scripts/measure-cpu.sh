#!/usr/bin/env bash
# Measures what the CPU pages of docs/results claim, in one command, and prints the tables: some twenty minutes on two cores
# with nothing else running. The benchmarks are those of the preset `dev`.
#   scripts/measure-cpu.sh [PART...]     all parts without arguments:
#   engine      a training step against the products in it, on both instruction sets  (engine-cpu.md)
#   attention   sparse attention against dense, both against one large sgemm          (attention-cpu.md)
#   planner     planning a step                                                       (simulate-planner.md)
#   balance     two MPI ranks, balanced against in order                              (balance-cpu.md)
#   pieces      the same with sequences in pieces                                     (balance-cpu.md)
# What a part prints is kept in build/measure-cpu/PART.log.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- engine attention planner balance pieces
bench=build/dev/bench
sparsebalance=build/dev/src/cli/sparsebalance
logs=build/measure-cpu
known=" engine attention planner balance pieces "
for part in "$@"; do
  [[ $known == *" $part "* ]] || { echo "$part: no such part; see the top of $0" >&2; exit 2; }
done

scripts/setup.sh test
cmake --preset dev >/dev/null
cmake --build --preset dev --target sparsebalance bench_engine bench_ops bench_attention planner_bench bench_balance \
  bench_pieces
mkdir -p "$logs"

engine() {
  $bench/train/bench_engine
  SB_CPU_ISA=avx2 $bench/train/bench_engine
  $bench/ops/bench_ops
}
attention() {
  for score in planes moments; do
    $sparsebalance bench attention --seq 16384 --density 0.1 1.0 --threads 2 --score $score
  done
  $bench/attention/bench_attention
}
planner() { $bench/plan/planner_bench; }
# A stretch of 19 batches at a time: those of one folder are added up.
balance() {
  local layout
  for layout in "" --pp; do
    rm -rf "$logs/balance$layout"
    for stretch in 1 2; do
      $bench/plan/bench_balance $layout --out "$logs/balance$layout" --batches 20 --policies in_order,sab+order+optimal
    done
    $bench/plan/bench_balance --summary $layout --out "$logs/balance$layout"
  done
}
pieces() {
  bench/plan/chunks_by_clock.sh "$logs/pieces" || echo "chunks_by_clock.sh: a limit is missed, see above"
  $bench/plan/bench_pieces
}

for part in "$@"; do
  printf '\n== %s (%s)\n' "$part" "$(date +%T)"
  ($part) 2>&1 | tee "$logs/$part.log"
done
printf '\n%s, %d cores; commit %s; %s\n' "$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1)" "$(nproc)" \
  "$(git describe --always --dirty)" "$(date '+%-d %B %Y')"
$sparsebalance doctor | grep -E '^(processor|matmuls)'
