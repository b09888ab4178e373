#!/usr/bin/env bash
# Everything that needs a GPU, in one command: builds the cuda preset, runs the GPU tests, then the benchmarks beside
# their peers (PyTorch and transformers where they can be imported), and prints one table with ratios and bars last.
#   scripts/gpu-check.sh [--only PART[,PART...]] [--no-peers] [--within SECONDS] [--out DIR]
# The parts, in this order; those up to `attention` run without --only, in about nine minutes on 16 cores:
#   build      the cuda preset, tests and benchmarks included
#   tests      ctest -L gpu
#   step       a training step of Qwen2.5-0.5B and 3B at 8K; with the portable attention kernels too
#   long       3B at 32K, 128K and 512K with sparse attention
#   packed     steps of 524,288 tokens in sequences of 1,024
#   attention  the attention kernels
#   fp8        the steps of `step`, `packed` and 128K of `long` with train.precision: fp8
#   pieces     attention of 4K queries on long prefixes; 3B at 128K whole and in pieces; 1M tokens of 3B, 2M of 0.5B
#   python     the Python package on the GPU: its tests, and training steps in transformers with our attention and sdpa
#   nccl       NCCL between two processes that share the GPU: what it answers, all operations, dp, pp, cp and tp 2
#   curve      600 steps of one training, by transformers and by sparsebalance: both loss curves and speeds
#   profiles   latencies of Qwen2.5-0.5B, 3B and 3B with LoRA of rank 32, for scripts/build-in-profile.py; into --out, or
#              build/cuda/gpu-check/profiles
#   sanitize   compute-sanitizer: memcheck on the test suites, racecheck and initcheck on the operations in bf16
#   sanitize-attention   compute-sanitizer: memcheck on attention, alone and in a ring, and on communication
#   racecheck-attention  compute-sanitizer: racecheck on attention and selection, built apart for it
# What a part prints is shown as it comes and kept in build/cuda/gpu-check/PART.log. The exit code is not 0 when a
# build, a test or a bar fails. --within: what has not ended by then is stopped and counts as failed; the table comes
# all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
parts="build tests step long packed attention"
peers=yes
out=build/cuda/gpu-check/profiles
deadline=$(($(date +%s) + 86400))
while [ $# -gt 0 ]; do
  case $1 in
    --only)
      parts=${2:-}
      parts=${parts//,/ }
      [ -n "$parts" ] || parts=none
      for part in $parts; do
        case $part in
          build | tests | step | long | packed | attention | fp8 | pieces | python | nccl | curve | profiles | sanitize | sanitize-attention | racecheck-attention) ;;
          *) echo "--only ${2:-}: no such part; see $0 --help" >&2; exit 2 ;;
        esac
      done
      shift 2 ;;
    --no-peers) peers=no; shift ;;
    --out) out=${2:?--out: which folder?}; shift 2 ;;
    --within) deadline=$(($(date +%s) + $2 - 5)); shift 2 ;;
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "unknown argument $1; see $0 --help" >&2; exit 2 ;;
  esac
done

# SECONDS, or what is left of all.
at_most() {
  local left=$((deadline - $(date +%s)))
  echo $((left < 1 ? 1 : left < $1 ? left : $1))
}
# limit SECONDS COMMAND...
limit() { timeout -k 5 "$(at_most "$1")" "${@:2}"; }
can_import() { [ $peers = yes ] && limit 30 python3 -c "import $1" 2>/dev/null; }
ours=build/cuda/bench/train/bench_step_cuda
export PYTHONUNBUFFERED=1

build() {
  cmake --preset cuda >/dev/null
  limit 400 cmake --build --preset cuda -j "$(nproc)"
}
tests() {
  nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
  limit 400 ctest --test-dir build/cuda -L gpu -j 8 --no-tests=error --output-on-failure
}
step() {
  limit 90 $ours all
  limit 40 $ours all --portable --steps 3 --no-classes
  if can_import transformers; then limit 90 python3 bench/peers/train_step_peers.py 0.5B:8192 3B:8192; fi
}
long() {
  limit 30 $ours 3B 32768 --budget 8192 --steps 2 --warm-up 1 --no-classes
  limit 60 $ours 3B 131072 --budget 8192 --recompute attention --steps 1 --warm-up 1 --no-classes
  limit 100 $ours 3B 524288 --budget 8192 --recompute layer --steps 1 --warm-up 0 --no-classes
  if can_import transformers; then
    limit 150 python3 bench/peers/train_step_peers.py 3B:32768:layer:steps2 3B:131072:layer:steps1
  fi
}
packed() {
  local how="--packed 1024 --tokens-per-step 524288 --loss-chunk 16384 --no-classes"
  limit 60 $ours 0.5B 65536 $how --steps 2 --warm-up 1
  limit 90 $ours 3B 32768 $how --steps 1 --warm-up 1
}
fp8() {
  limit 40 $ours 0.5B 8192 --steps 5 --no-classes --fp8
  limit 40 $ours 3B 8192 --steps 5 --no-classes --fp8
  limit 60 $ours 3B 131072 --budget 8192 --recompute attention --steps 1 --warm-up 1 --no-classes --fp8
  local how="--packed 1024 --tokens-per-step 524288 --loss-chunk 16384 --no-classes --fp8"
  limit 60 $ours 0.5B 65536 $how --steps 2 --warm-up 1
  limit 90 $ours 3B 32768 $how --steps 1 --warm-up 1
  if can_import transformers; then limit 90 python3 bench/peers/train_step_peers.py 0.5B:8192 3B:8192; fi
}
pieces() {
  local how="--budget 8192 --score moments --steps 1 --no-classes"
  limit 60 $ours 3B 131072 $how --warm-up 1 --offload 0 --recompute attention
  limit 60 $ours 3B 131072 $how --warm-up 1 --offload 0 --recompute attention --chunk 8192
  limit 60 $ours 3B 131072 $how --warm-up 1 --offload 0 --recompute chunk --chunk 8192
  limit 200 $ours 3B 1048576 $how --warm-up 0 --recompute chunk --chunk 8192 --loss-chunk 1024 --offload-optimizer
  limit 200 $ours 0.5B 2097152 $how --warm-up 0 --recompute chunk --chunk 8192 --loss-chunk 1024
  limit 60 build/cuda/bench/attention/attention_prefix_bench # fails where a piece is too slow
}
python() {
  can_import torch || { echo "python needs torch (and no --no-peers)"; return 1; }
  limit 500 scripts/test-python-cuda.sh --bench
}
attention() {
  limit 120 build/cuda/bench/attention/attention_hopper_bench all
  if can_import torch; then limit 120 python3 bench/peers/attention_lists.py; fi
}

# NCCL may have come with PyTorch alone.
nccl() {
  limit 150 python3 tests/comm/nccl_one_gpu.py || [ $? = 77 ]
  local own
  own=$(python3 -c 'import os, nvidia.nccl; print(os.path.join(list(nvidia.nccl.__path__)[0], "lib"))' 2>/dev/null || true)
  [ -z "$own" ] || export LD_LIBRARY_PATH=$own${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  limit 400 build/cuda/tests/train/nccl_ranks_test
}

profiles() {
  mkdir -p "$out"
  local name
  for name in qwen2.5-0.5b qwen2.5-3b qwen2.5-3b-lora32; do
    limit 150 build/cuda/src/cli/sparsebalance profile --device cuda --model ${name%-lora32} --budget 8192 --held-out 40 \
      $([ $name = ${name%-lora32} ] || echo --lora 32) --out "$out/$name.json" --samples "$out/$name.csv"
  done
}

curve() {
  can_import transformers || { echo "curve needs transformers (and no --no-peers)"; return 1; }
  limit 180 python3 bench/peers/training_curve.py --device cuda --out build/cuda/gpu-check/curve
}

# Every run of compute-sanitizer is a process of its own, all of a part side by side, since they keep the host busy rather
# than the GPU. What is not ended after 240 s is stopped.
begin_checks() {
  dir=build/cuda/gpu-check/$1
  pids=
  rm -rf "$dir" && mkdir -p "$dir"
  trap 'kill $pids 2>/dev/null || true' EXIT
  trap 'exit 1' TERM INT
  export SB_TEST_SHORT=1
}
# check NAME TOOL SHARDS PROGRAM ARGUMENTS...: with more than one shard, a gtest program, cut by gtest
check() {
  local i
  for ((i = 0; i < $3; ++i)); do
    GTEST_TOTAL_SHARDS=$3 GTEST_SHARD_INDEX=$i timeout -k 5 "$(at_most 240)" compute-sanitizer --tool "$2" \
      --error-exitcode 9 build/cuda/tests/"$4" "${@:5}" >"$dir/$2-$1-$i.log" 2>&1 &
    pids+=" $!"
  done
}
end_checks() {
  local clean=yes i log
  for i in $pids; do wait "$i" || clean=no; done
  for log in "$dir"/*.log; do
    printf '%-44s %-64s %s\n' "$(basename "$log" .log)" \
      "$(grep SUMMARY "$log" | head -1 | sed 's/=* *//' | grep . || echo 'not finished')" \
      "$(sed -n 's/.* ran\. (\([0-9]*\)[0-9]\{3\} ms total)/\1 s/p' "$log")"
    # Nor may a test fail, or a filter that finds none pass.
    if ! grep -q 'SUMMARY: 0' "$log" || grep -qE 'FAILED|\] 0 tests' "$log"; then
      clean=no
      head -12 "$log"
      echo ...
      tail -25 "$log"
    fi
  done
  [ $clean = yes ]
}

# What is left out, and why: cuBLASLt's split products, which RealVocabulary and ManyTokens have, are hazards to racecheck
# (kernels nvjet_..._splitK of the library); initcheck does not see what its products of aligned bf16 matrices store
# through the copy engine and takes logits (CrossEntropyTest.ReadsNothingItDidNotWrite shows that none is) and the sums of
# split products for unwritten. They run in fp32 instead. TooMuchIsRefused asks for memory that is not there, ReadsNothing
# copies scratch memory before it fills it.
sanitize() {
  begin_checks sanitize
  local brief=--gtest_brief=1
  check operations memcheck 2 ops/ops_test $brief --gtest_filter='*cuda*'
  # So many that no two of the long cases share one.
  check stages memcheck 8 model/model_test $brief --gtest_filter='*cuda*:*Cuda*'
  check evaluation memcheck 2 eval/eval_test $brief --gtest_filter='*cuda*'
  check device memcheck 1 device/device_test $brief --gtest_filter='*cuda*:*Cuda*-*TooMuchIsRefused*'
  check operations racecheck 3 ops/ops_test $brief --gtest_filter='*cuda_bf16*-*RealVocabulary*:*LinearTest.ManyTokens*'
  check float32 racecheck 1 ops/ops_test $brief \
    --gtest_filter='*RealVocabulary*cuda_f32*:*LinearTest.ManyTokens*cuda_f32*'
  check operations initcheck 1 ops/ops_test $brief --gtest_filter='*cuda_bf16*-*CrossEntropy*:*LinearTest.ManyTokens*'
  check float32 initcheck 2 ops/ops_test $brief \
    --gtest_filter='*CrossEntropy*cuda_f32*:*LinearTest.ManyTokens*cuda_f32*-*ReadsNothing*'
  end_checks
}

# Of the tests of attention those that have every kernel; the rest has them in other shapes. NCCL's kernels are not ours.
sanitize-attention() {
  begin_checks sanitize-attention
  local brief=--gtest_brief=1
  check hopper memcheck 1 attention/gpu/hopper/attention_hopper_test --short
  check selection memcheck 1 attention/gpu/hopper/attention_select_test --short
  check attention memcheck 4 attention/attention_cuda_test $brief \
    --gtest_filter='*GatheredColumns*:*OddQueryBlocks*:*VerticalSlash*:*MeasuresCoverage*:*Future*:*SelectsWhat*:*Needle*:*AreNone*'
  check ring memcheck 3 parallel/ring/cuda_ring_test $brief \
    --gtest_filter='*RanksWithout*:*GivenLists*bf16:*Selections*/bf16_topk:*Selections*/f32_mass:*Selections*/bf16_parts'
  check communication memcheck 1 comm/comm_device_test $brief --gtest_filter='CudaOrder*:*OnCuda.Staged*'
  end_checks
}

# Kernels whose barriers racecheck can follow (src/attention/gpu/hopper/tile.cuh). Forward and both backwards of each case:
# both head dimensions, dense, lists, staircase, split columns, blocks of 64; selection on the Hopper and the portable
# kernels: blocks, parts of blocks, every pattern.
racecheck-attention() {
  limit 300 cmake --build --preset cuda -j "$(nproc)" --target attention_hopper_race attention_select_race
  begin_checks racecheck-attention
  local case
  for case in "dense 8:1 128 d64" "dense 8:1 128 d128" "sparse 14:2 qb16 d64" "sparse 16:2 qb16 d128" \
    "staircase 16:2 qb64 d128" "hub columns 8:1 qb16 d64" "peaked 4 blocks of 64 d64" "peaked 4 blocks of 64 d128"; do
    check "${case// /-}" racecheck 1 attention/gpu/hopper/attention_hopper_race --hopper "$case"
  done
  for case in "16:2 d128 4000" "14:2 d64 mixed" "8:2 d64 topp" "8:2 d64 mass, high" "8:1 d128 lookahead mass" \
    "14:2 d64 parts of 64"; do
    check "select-${case// /-}" racecheck 1 attention/gpu/hopper/attention_select_race --short "$case"
  done
  end_checks
}

mkdir -p build/cuda/gpu-check
if [ "${parts%% *}" != build ] && [ ! -f build/cuda/build.ninja ]; then
  echo "nothing is built: run scripts/gpu-check.sh --only build first" >&2
  exit 1
fi
failed=
times=
for part in $parts; do rm -f build/cuda/gpu-check/$part.log; done  # the table is of this run
for part in $parts; do
  log=build/cuda/gpu-check/$part.log
  if [ "$(date +%s)" -ge "$deadline" ]; then
    failed+=" $part (no time left)"
    continue
  fi
  echo "== $part (log: $log)"
  SECONDS=0
  (set -e; $part) 2>&1 | tee "$log"
  if [ "${PIPESTATUS[0]}" != 0 ]; then
    failed+=" $part"
    echo "== $part FAILED"
    [ $part != build ] || break
  fi
  times+=" $part $SECONDS s,"
done

echo
echo "time:${times%,}"
logs=
for part in $parts; do logs+=" build/cuda/gpu-check/$part.log"; done
python3 scripts/gpu-check-table.py $logs || failed+=" bars"
if [ -n "$failed" ]; then
  echo "FAILED:$failed; the logs are in build/cuda/gpu-check" >&2
  exit 1
fi
