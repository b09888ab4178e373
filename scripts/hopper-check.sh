#!/usr/bin/env bash
# Builds, checks and times the Hopper attention kernels with nothing but nvcc (and PyTorch for the peers).
#   scripts/hopper-check.sh [check|quick|all] [--peers] [--sanitize]
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-all}
out=build/hopper
mkdir -p $out
flags="-O3 -std=c++20 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -lineinfo -Isrc -I."
pids=()
for file in src/attention/hopper/*.cu tests/attention/hopper/hopper_test.cu \
    tests/attention/hopper/select_test.cu bench/attention/hopper/attention_bench.cu; do
  nvcc $flags -c "$file" -o $out/$(basename "$file" .cu).o >$out/$(basename "$file" .cu).log 2>&1 &
  pids+=($!)
done
for file in src/attention/hopper/*.cpp src/attention/selection/staircase.cpp src/core/errors.cpp; do
  g++ -O2 -std=c++20 -Isrc -c "$file" -o $out/$(echo "$file" | tr / _).o &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { cat $out/*.log; exit 1; }; done
library=$(ls $out/*.o | grep -v -e hopper_test.o -e select_test.o -e attention_bench.o)
nvcc $out/hopper_test.o $library -lfmt -o $out/hopper_test
nvcc $out/select_test.o $library -lfmt -o $out/select_test
nvcc $out/attention_bench.o $library -lfmt -o $out/attention_bench
[ "$mode" = build ] && exit 0
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader
timeout 200 $out/hopper_test
timeout 200 $out/select_test
if [[ " $* " == *" --sanitize "* ]]; then
  compute-sanitizer --tool memcheck $out/hopper_test --short | tail -3
  compute-sanitizer --tool memcheck $out/select_test | tail -3
fi
[ "$mode" = check ] && exit 0
timeout 200 $out/attention_bench "$mode"
if [[ " $* " == *" --peers "* ]]; then
  PYTHONUNBUFFERED=1 python3 bench/peers/attention_lists.py
fi
