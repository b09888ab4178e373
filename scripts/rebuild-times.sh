#!/usr/bin/env bash
# What it takes to rebuild after an edit, in preset dev: one source, one deep header, one test. Each file is taken for
# changed, without the compiler cache; builds everything first where that is not done. Prints compilations, wall and
# processor time of each.
#   scripts/rebuild-times.sh [FILE...]     other files
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- src/plan/tuning/price_tuner.cpp tests/plan/tuning_test.cpp src/attention/attention.h src/core/errors.h
scripts/setup.sh test
cmake --preset dev >/dev/null
cmake --build --preset dev

TIMEFORMAT='%R %U %S'
times=$(mktemp)
trap 'rm -f "$times"' EXIT
export CCACHE_DISABLE=1
printf '\n%-34s %12s %9s %11s\n' "edited" "compilations" "wall" "processor"
for file in "$@"; do
  touch "$file"
  steps=$(cmake --build --preset dev -- -n | grep -c 'Building C' || true)
  { time cmake --build --preset dev >/dev/null; } 2>"$times"
  read -r wall user system < <(tail -1 "$times")
  printf '%-34s %12d %7.0f s %9.0f s\n' "$file" "$steps" "$wall" "$(awk "BEGIN { print $user + $system }")"
done
printf '%s, %d cores, commit %s\n' "$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1)" "$(nproc)" \
  "$(git rev-parse --short HEAD)"
