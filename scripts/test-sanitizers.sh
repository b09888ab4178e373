#!/usr/bin/env bash
# Tests built with clang under the address and undefined-behaviour sanitizers: a sample; with --all every test that needs
# no GPU, then those of scripts/test-tsan.sh under the thread sanitizer. Further arguments go to ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
export UBSAN_OPTIONS=print_stacktrace=1 SB_PRESET=cpu-asan
scripts/setup.sh ci
if [ "${1:-}" = --all ]; then
  shift
  scripts/test.sh --all "$@"
  exec scripts/test-tsan.sh
fi

# Every folder of src/ has tests here, with whatever reads files, moves rows about or shares memory between threads.
whole=(
  core_test device_test data_test comm_test comm_device_test parallel_test ring_test attention_gpu_work_test
  selection_test model_test plan_test planner_test run_test train_test balanced_training_test report_test eval_test cli_test
)
# Every fourth case of those that would take minutes.
quarter=(ops_test attention_test train_ranks_test)
# Left out: model_memory_test and trainings as processes of their own, whose memory and signals the sanitizers change;
# what runs the narrower instruction set, kills or fails system calls: slow, and the same code.

cmake --preset cpu-asan >/dev/null
cmake --build --preset cpu-asan --target "${whole[@]}" "${quarter[@]}"
run_tests() {
  local names
  names=$(IFS='|' && echo "$*")
  ctest --test-dir build/cpu-asan --output-on-failure --no-tests=error -j "$(nproc)" -R "^($names)\$" "${arguments[@]}"
}
arguments=("$@")
run_tests "${whole[@]}"
GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=0 run_tests "${quarter[@]}"
echo "a sample: $((${#whole[@]} + ${#quarter[@]})) tests; scripts/test-sanitizers.sh --all runs every one"
