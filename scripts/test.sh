#!/usr/bin/env bash
# Set-up, build, and the tests that say whether the program works here: those that take seconds and those with several
# ranks. With --all also the slow ones: kill tests, failing system calls, the report in a browser, the narrower instruction
# set; and two cases of a cluster, where it is root. Further arguments go to ctest, for example -R core.
# SB_PRESET=cpu-asan tests the build with sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${SB_PRESET:-cpu}
left_out='gpu|nccl|slow|cluster'
if [ "${1:-}" = --all ]; then
  left_out='gpu|nccl'
  shift
fi

scripts/setup.sh test
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset"
status=0
ctest --test-dir "build/$preset" --output-on-failure -LE "$left_out" -j "$(nproc)" "$@" || status=$?

count() { ctest --test-dir "build/$preset" -N -L "$1" | sed -n 's/^Total Tests: //p'; }
case $left_out in
  *slow*) echo "left out: $(count '^slow$') slow tests; scripts/test.sh --all runs them too" ;;
esac
exit $status
