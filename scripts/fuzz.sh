#!/usr/bin/env bash
# Runs every fuzz target on its corpus (fuzz/corpus/<name>) for 30 seconds, or as many as the first argument says; further
# arguments choose targets ("jsonl llmc"). What it finds new stays in the build folder; a crash is written there and its
# path printed. Ends with an error when a target crashed, leaked or ran into a sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-30}
if ! [[ $seconds =~ ^[0-9]+$ ]]; then
  echo "usage: scripts/fuzz.sh [seconds [target...]]" >&2
  exit 2
fi
shift || true

scripts/setup.sh ci
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target fuzz

if [ $# -eq 0 ]; then
  set -- $(cd fuzz && ls ./*_fuzz.cpp | sed 's|^\./||; s|_fuzz\.cpp$||')
fi
failed=()
for name in "$@"; do
  found=build/fuzz/found/$name
  mkdir -p "$found" "fuzz/corpus/$name"
  echo "== $name: $seconds s"
  dictionary=()
  [ -f "fuzz/corpus/$name.dict" ] && dictionary=("-dict=fuzz/corpus/$name.dict")
  if ! "build/fuzz/fuzz/${name}_fuzz" -max_total_time="$seconds" -timeout=120 -rss_limit_mb=4096 -max_len=16384 \
      -print_final_stats=1 -verbosity=1 -artifact_prefix="$found/" "${dictionary[@]}" "$found" "fuzz/corpus/$name" \
      >"$found.log" 2>&1; then
    failed+=("$name")
    tail -40 "$found.log"
  fi
  grep -E "^(stat::number_of_executed_units|stat::peak_rss_mb|Done)|cov: [0-9]+ ft" "$found.log" | tail -4
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (inputs under build/fuzz/found)" >&2
  exit 1
fi
echo "no crash, no leak: $*"
