#!/usr/bin/env bash
# Builds, checks and times the CUDA attention kernels with nothing but nvcc (and PyTorch for the peers).
#   scripts/hopper-check.sh [build|check|quick|all|race] [--peers] [--sanitize] [--built]
# race: nothing but racecheck, on kernels whose barriers it can follow (SB_RACECHECK, src/attention/hopper/tile.cuh);
# with the cuda preset the same test is the target attention_hopper_race.
# --built: uses what an earlier `build` left in build/hopper, if it runs here.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-all}
out=build/hopper
mkdir -p $out
flags="-O3 -std=c++20 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -lineinfo -Isrc -I."
tests="hopper_test select_test attention_bench"

build() {
  local jobs=${JOBS:-$(nproc)} files
  files="$(ls src/attention/hopper/*.cu src/attention/cuda/*.cu) tests/attention/hopper/hopper_test.cu
    tests/attention/hopper/select_test.cu bench/attention/hopper/attention_bench.cu"
  rm -f $out/*.o
  echo $files | tr ' ' '\n' | xargs -P "$jobs" -I{} sh -c \
    "nvcc $flags -Xptxas -v -c {} -o $out/\$(basename {} .cu).o >$out/\$(basename {} .cu).log 2>&1 || { cat $out/\$(basename {} .cu).log; exit 255; }"
  for file in src/attention/cuda/{errors,select_plan,work}.cpp src/attention/selection/{staircase,vertical_slash}.cpp \
    src/core/errors.cpp; do
    g++ -O2 -std=c++20 -DFMT_HEADER_ONLY -Isrc -c "$file" -o $out/$(echo "$file" | tr / _).o
  done
  local library
  library=$(ls $out/*.o | grep -v -e hopper_test.o -e select_test.o -e attention_bench.o)
  for test in $tests; do nvcc $out/$test.o $library -o $out/$test; done
}

if [[ " $* " == *" --built "* ]] && $out/attention_bench quick none >/dev/null 2>&1; then
  echo "built before"
else
  build
fi
[ "$mode" = build ] && exit 0
if [ "$mode" = race ]; then
  mkdir -p $out/race
  rm -f $out/race/*.o
  kernels="backward backward_rows forward gathered launch prepare"
  for name in src/attention/hopper/{backward,backward_rows,forward,gathered,launch,prepare} \
    tests/attention/hopper/hopper_test; do echo $name; done |
    xargs -P "${JOBS:-$(nproc)}" -I{} sh -c "nvcc $flags -DSB_RACECHECK -c {}.cu -o $out/race/\$(basename {}).o"
  others=$(ls $out/*.o | grep -v -e "_test.o" -e attention_bench.o $(printf -- ' -e /%s.o' $kernels))
  nvcc $out/race/*.o $others -o $out/race_test
  failed=0
  for case in "dense 8:1 128 d64" "dense 8:1 128 d128" "sparse 14:2 qb16 d64" "sparse 16:2 qb16 d128" \
    "staircase 16:2 qb64 d128"; do
    echo "racecheck, $case"
    timeout 120 compute-sanitizer --tool racecheck --racecheck-report analysis --error-exitcode 9 $out/race_test \
      --hopper "$case" | tail -4 || failed=1
  done
  exit $failed
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader
timeout 200 $out/hopper_test
timeout 200 $out/select_test
if [[ " $* " == *" --sanitize "* ]]; then
  compute-sanitizer --tool memcheck $out/hopper_test --short | tail -3
  compute-sanitizer --tool memcheck $out/select_test --short | tail -3
fi
[ "$mode" = check ] && exit 0
timeout 200 $out/attention_bench "$mode"
if [[ " $* " == *" --peers "* ]]; then
  PYTHONUNBUFFERED=1 python3 bench/peers/attention_lists.py
fi
