#!/usr/bin/env bash
# Tests built with clang under the address and undefined-behaviour sanitizers: a sample that reaches every folder of src/;
# with --all every test that needs no GPU, then those of scripts/test-tsan.sh under the thread sanitizer. Further arguments
# go to ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
export UBSAN_OPTIONS=print_stacktrace=1 SB_PRESET=cpu-asan
scripts/setup.sh ci
if [ "${1:-}" = --all ]; then
  shift
  scripts/test.sh --all "$@"
  exec scripts/test-tsan.sh
fi
scripts/test.sh "$@"
