#!/usr/bin/env bash
# The tests in which threads work together, under the thread sanitizer: ranks that are threads, planners beside the
# steps, checkpoints saved in the background, the thread pool. Further arguments go to every test, for example
# --gtest_filter=Ranks.*. The first race ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
targets=(core_test comm_test planner_test run_test train_ranks_test balanced_training_test)

scripts/setup.sh test
cmake --preset cpu-tsan >/dev/null
cmake --build --preset cpu-tsan -j "${SB_JOBS:-$(nproc)}" --target "${targets[@]}"
# The library that multiplies is not compiled with the sanitizer: no threads of its own.
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
export OPENBLAS_NUM_THREADS=1
for target in "${targets[@]}"; do
  echo "== $target"
  "$(find build/cpu-tsan/tests -type f -name "$target")" --gtest_brief=1 "$@"
done
