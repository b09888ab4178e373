#!/usr/bin/env bash
# Set-up, build, and every test that needs no GPU. Further arguments go to ctest, for example -L fast or -R core.
# SB_PRESET=cpu-asan tests the build with sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${SB_PRESET:-cpu}

scripts/setup.sh
cmake --preset "$preset"
cmake --build --preset "$preset"
log=build/$preset/ctest.log
ctest --preset "$preset" -LE 'gpu|nccl' -j "$(nproc)" "$@" | tee "$log"

# The budgets of the labels (CONTRIBUTING.md), in processor seconds of two cores. A hint, not a failure: machines differ.
if [ "$preset" = cpu ]; then
  awk '$1 == "fast" { budget = 360 } $1 == "slow" { budget = 960 } $1 == "multi" { budget = 480 }
       $2 == "=" && budget { if ($3 > budget) print "note: label " $1 " took " $3 " s, its budget is " budget " s"; budget = 0 }' "$log"
fi
