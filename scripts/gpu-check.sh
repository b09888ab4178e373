#!/usr/bin/env bash
# Everything that needs a GPU: builds the cuda preset, runs the GPU tests, then the benchmarks beside their peers.
#   scripts/gpu-check.sh [--only build|tests|attention|step] [--no-peers]
# The parts, in this order; each stays under nine minutes on 16 cores:
#   build      the cuda preset, tests and benchmarks included
#   tests      ctest -L gpu
#   attention  the attention kernels (and, with PyTorch, cuDNN, FlashAttention and FlexAttention)
#   step       a training step of Qwen2.5-0.5B and 3B at 8K (and, with PyTorch and transformers, theirs)
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
case $only in all | build | tests | attention | step) ;; *) echo "--only $only: build, tests, attention or step" >&2; exit 2 ;; esac
part() { [ "$only" = all ] || [ "$only" = "$1" ]; }
with_peers() { [ $peers = yes ] && python3 -c "import $1" 2>/dev/null; }

if part build; then
  cmake --preset cuda >/dev/null
  time cmake --build --preset cuda -j "$(nproc)"
fi
if ! part build && [ ! -d build/cuda ]; then
  echo "build/cuda is not there: run scripts/gpu-check.sh --only build first" >&2
  exit 1
fi
if part tests; then
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  timeout 540 ctest --test-dir build/cuda -L gpu --output-on-failure
fi
if part attention; then
  timeout 240 build/cuda/bench/attention/attention_hopper_bench quick
  if with_peers torch; then PYTHONUNBUFFERED=1 timeout 240 python3 bench/peers/attention_lists.py; fi
fi
if part step; then
  timeout 240 build/cuda/bench/train/bench_step_cuda all
  if with_peers transformers; then PYTHONUNBUFFERED=1 timeout 240 python3 bench/peers/train_step_peers.py 0.5B:8192 3B:8192; fi
fi
