#!/usr/bin/env bash
# Everything that needs a GPU, in one command: builds the cuda preset, runs the GPU tests, then the benchmarks beside
# their peers (PyTorch and transformers where they can be imported), and prints one table with ratios and bars last.
#   scripts/gpu-check.sh [--only PART[,PART...]] [--no-peers] [--within SECONDS]
# The parts, in this order; all but the last run without --only, in about eight minutes on 16 cores:
#   build      the cuda preset, tests and benchmarks included
#   tests      ctest -L gpu
#   step       a training step of Qwen2.5-0.5B and 3B at 8K; with the portable attention kernels too
#   long       3B at 128K with sparse attention, then 3B at 512K
#   packed     steps of 524,288 tokens in sequences of 1,024
#   attention  the attention kernels
#   sanitize   compute-sanitizer: memcheck on the test suites, racecheck and initcheck on the operations in bf16
# What a part prints is shown as it comes and kept in build/cuda/gpu-check/PART.log. The exit code is not 0 when a
# build, a test or a bar fails. --within: what has not ended by then is stopped and counts as failed; the table comes
# all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
parts="build tests step long packed attention"
peers=yes
deadline=$(($(date +%s) + 86400))
while [ $# -gt 0 ]; do
  case $1 in
    --only)
      parts=${2:-}
      parts=${parts//,/ }
      [ -n "$parts" ] || parts=none
      for part in $parts; do
        case $part in
          build | tests | step | long | packed | attention | sanitize) ;;
          *) echo "--only ${2:-}: build, tests, step, long, packed, attention or sanitize" >&2; exit 2 ;;
        esac
      done
      shift 2 ;;
    --no-peers) peers=no; shift ;;
    --within) deadline=$(($(date +%s) + $2 - 5)); shift 2 ;;
    *) echo "unknown argument $1; see the head of $0" >&2; exit 2 ;;
  esac
done

# SECONDS, or what is left of all.
at_most() {
  local left=$((deadline - $(date +%s)))
  echo $((left < 1 ? 1 : left < $1 ? left : $1))
}
# limit SECONDS COMMAND...
limit() { timeout -k 5 "$(at_most "$1")" "${@:2}"; }
can_import() { [ $peers = yes ] && python3 -c "import $1" 2>/dev/null; }
ours=build/cuda/bench/train/bench_step_cuda
export PYTHONUNBUFFERED=1

build() {
  cmake --preset cuda >/dev/null
  limit 400 cmake --build --preset cuda -j "$(nproc)"
}
tests() {
  nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
  limit 400 ctest --test-dir build/cuda -L gpu -j 4 --output-on-failure
}
step() {
  limit 90 $ours all
  limit 40 $ours all --portable --steps 3 --no-classes
  if can_import transformers; then limit 90 python3 bench/peers/train_step_peers.py 0.5B:8192 3B:8192; fi
}
long() {
  limit 60 $ours 3B 131072 --budget 8192 --recompute attention --steps 1 --warm-up 1 --no-classes
  if can_import transformers; then limit 120 python3 bench/peers/train_step_peers.py 3B:131072:layer:steps1; fi
  limit 100 $ours 3B 524288 --budget 8192 --recompute layer --steps 1 --warm-up 0 --no-classes
}
packed() {
  local how="--packed 1024 --tokens-per-step 524288 --loss-chunk 16384 --no-classes"
  limit 60 $ours 0.5B 65536 $how --steps 2 --warm-up 1
  limit 90 $ours 3B 32768 $how --steps 1 --warm-up 1
}
attention() {
  limit 90 build/cuda/bench/attention/attention_hopper_bench all
  if can_import torch; then limit 120 python3 bench/peers/attention_lists.py; fi
}

# Every run is a process of its own, all side by side, since they keep the host busy rather than the GPU. What is left
# out, and why: cuBLASLt's split products, which only RealVocabulary has, are hazards to racecheck (kernels nvjet_..._splitK
# of the library); initcheck does not see what its products of aligned bf16 matrices store through the copy engine and
# takes logits for unwritten (CrossEntropyTest.ReadsNothingItDidNotWrite shows that none is). Both run in fp32 instead.
# TooMuchIsRefused asks for memory that is not there, ReadsNothing copies scratch memory before it fills it.
sanitize() {
  local dir=build/cuda/gpu-check/sanitize tests=build/cuda/tests i log clean=yes
  pids=
  rm -rf $dir && mkdir -p $dir
  trap 'kill $pids 2>/dev/null || true' EXIT
  trap 'exit 1' TERM INT
  # check NAME TOOL PROGRAM FILTER SHARDS
  check() {
    for ((i = 0; i < $5; ++i)); do
      GTEST_TOTAL_SHARDS=$5 GTEST_SHARD_INDEX=$i timeout -k 5 "$(at_most 240)" compute-sanitizer --tool "$2" \
        --error-exitcode 9 $tests/"$3" --gtest_filter="$4" --gtest_brief=1 >$dir/"$2-$1-$i.log" 2>&1 &
      pids+=" $!"
    done
  }
  check operations memcheck ops/ops_test '*cuda*' 2
  check stages memcheck model/model_test '*cuda*:*Cuda*' 4
  check evaluation memcheck eval/eval_test '*cuda*' 2
  check device memcheck device/device_test '*cuda*:*Cuda*-*TooMuchIsRefused*' 1
  check operations racecheck ops/ops_test '*cuda_bf16*-*RealVocabulary*' 3
  check loss racecheck ops/ops_test '*RealVocabulary*cuda_f32*' 1
  check operations initcheck ops/ops_test '*cuda_bf16*-*CrossEntropy*' 1
  check loss initcheck ops/ops_test '*CrossEntropy*cuda_f32*-*ReadsNothing*' 2
  for i in $pids; do wait "$i" || clean=no; done
  for log in $dir/*.log; do
    printf '%-26s %s\n' "$(basename "$log" .log)" "$(grep SUMMARY "$log" | sed 's/=* *//' || echo 'not finished')"
    grep -q 'SUMMARY: 0' "$log" || { clean=no; tail -25 "$log"; }
  done
  [ $clean = yes ]
}

mkdir -p build/cuda/gpu-check
if [ "${parts%% *}" != build ] && [ ! -f build/cuda/build.ninja ]; then
  echo "nothing is built: run scripts/gpu-check.sh --only build first" >&2
  exit 1
fi
failed=
times=
for part in $parts; do
  log=build/cuda/gpu-check/$part.log
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
