#!/usr/bin/env bash
# Everything that needs a GPU: builds the cuda preset, runs the GPU tests, then the benchmarks beside their peers, and
# prints one table of training steps at the end.
#   scripts/gpu-check.sh [--only build|tests|sanitize|attention|step|packed|long] [--no-peers]
# The parts, in this order; each stays under nine minutes on 16 cores:
#   build      the cuda preset, tests and benchmarks included
#   tests      ctest -L gpu
#   sanitize   compute-sanitizer on the operations and stages: memcheck, racecheck, initcheck
#   attention  the attention kernels (and, with PyTorch, cuDNN, FlashAttention and FlexAttention)
#   step       a training step of Qwen2.5-0.5B and 3B at 8K (and, with PyTorch and transformers, theirs)
#   packed     steps of 524,288 tokens in sequences of 1,024
#   long       3B at 128K with sparse attention (and theirs, dense), then 3B at 512K
set -euo pipefail
cd "$(dirname "$0")/.."
only=all
peers=yes
while [ $# -gt 0 ]; do
  case $1 in
    --only) only=$2; shift 2 ;;
    --no-peers) peers=no; shift ;;
    *) echo "unknown argument $1; see the head of $0" >&2; exit 2 ;;
  esac
done
case $only in
  all | build | tests | sanitize | attention | step | packed | long) ;;
  *) echo "--only $only: build, tests, sanitize, attention, step, packed or long" >&2; exit 2 ;;
esac
part() { [ "$only" = all ] || [ "$only" = "$1" ]; }
with_peers() { [ $peers = yes ] && python3 -c "import $1" 2>/dev/null; }
step_peers() {
  if with_peers transformers; then PYTHONUNBUFFERED=1 timeout 240 python3 bench/peers/train_step_peers.py "$@" | tee -a "$steps"; fi
}

if part build; then
  cmake --preset cuda >/dev/null
  time cmake --build --preset cuda -j "$(nproc)"
fi
if ! part build && [ ! -d build/cuda ]; then
  echo "build/cuda is not there: run scripts/gpu-check.sh --only build first" >&2
  exit 1
fi
ours=build/cuda/bench/train/bench_step_cuda
steps=build/cuda/gpu-check-steps.txt
: >"$steps"
if part tests; then
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  timeout 540 ctest --test-dir build/cuda -L gpu --output-on-failure
fi
if part sanitize; then
  check() { timeout 180 compute-sanitizer --error-exitcode 9 --tool "$@" --gtest_brief=1; }
  check memcheck build/cuda/tests/ops/ops_test --gtest_filter='*cuda*'
  # What these find in the libraries' kernels is told and does not stop the rest.
  check racecheck build/cuda/tests/ops/ops_test --gtest_filter='*cuda_bf16*' || echo "racecheck: see above"
  check initcheck build/cuda/tests/ops/ops_test --gtest_filter='*cuda_bf16*' || echo "initcheck: see above"
  check memcheck build/cuda/tests/model/model_test --gtest_filter='*CudaStage*Inputs*/bf16:*CudaStage*Agrees/bf16'
fi
if part attention; then
  timeout 240 build/cuda/bench/attention/attention_hopper_bench quick
  if with_peers torch; then PYTHONUNBUFFERED=1 timeout 240 python3 bench/peers/attention_lists.py; fi
fi
if part step; then
  timeout 240 $ours all | tee -a "$steps"
  step_peers 0.5B:8192 3B:8192
fi
if part packed; then
  timeout 120 $ours 0.5B 65536 --packed 1024 --tokens-per-step 524288 --steps 3 --loss-chunk 16384 --no-classes | tee -a "$steps"
  timeout 180 $ours 3B 32768 --packed 1024 --tokens-per-step 524288 --steps 2 --loss-chunk 16384 --no-classes | tee -a "$steps"
fi
if part long; then
  timeout 120 $ours 3B 131072 --budget 8192 --recompute attention --steps 2 --warm-up 1 --no-classes | tee -a "$steps"
  step_peers 3B:131072:layer:steps2
  timeout 180 $ours 3B 524288 --budget 8192 --recompute layer --steps 1 --warm-up 0 --no-classes | tee -a "$steps"
fi
if [ -s "$steps" ]; then
  echo
  echo "training steps, tokens/s"
  # A peer's case is the line of ours with the same model and length.
  awk '
    /^Qwen2.5-.*tokens\/s/ { split($1, name, "-"); at = $3; sub(",", "", at); key = name[2] ":" at
                             for (i = 1; i <= NF; ++i) if ($i ~ /^tokens\/s/) rate[key] = $(i - 1)
                             line[++n] = $0; of[n] = key }
    /"tok_s"/ { match($0, /"size": "[^"]*"/); size = substr($0, RSTART + 9, RLENGTH - 10)
                match($0, /"S": [0-9]+/); tokens = substr($0, RSTART + 5, RLENGTH - 5)
                match($0, /"tok_s": [0-9]+/); peer[size ":" tokens] = substr($0, RSTART + 9, RLENGTH - 9) }
    END { for (i = 1; i <= n; ++i) {
            key = of[i]
            print "  " line[i] (key in peer ? sprintf("; PyTorch %s: %.2f x", peer[key], rate[key] / peer[key]) : "") } }
  ' "$steps"
fi
