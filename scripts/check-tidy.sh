#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy has the checks) on the sources that changed, each by itself: what does not compile without
# its neighbours fails here, too. Changed: since the branch left main; on main itself since the commit before.
#   scripts/check-tidy.sh [--at-most N] [COMMIT]   since COMMIT; says what it leaves out when more than N sources changed
#   scripts/check-tidy.sh --all                    every source of the build without CUDA: half an hour
set -euo pipefail
cd "$(dirname "$0")/.."
most=1000000
all=no
base=
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=yes ;;
    --at-most) most=$2; shift ;;
    -*) echo "usage: scripts/check-tidy.sh [--all] [--at-most N] [COMMIT]" >&2; exit 2 ;;
    *) base=$1 ;;
  esac
  shift
done
scripts/setup.sh ci
tidy=$(command -v clang-tidy-14 || command -v clang-tidy)
# Its compile commands have every source by itself; nothing is built.
cmake --preset dev >/dev/null

if [ $all = no ] && [ -z "$base" ]; then
  main=$(git rev-parse -q --verify main || git rev-parse -q --verify origin/main || true)
  base=$([ -n "$main" ] && git merge-base HEAD "$main" || git rev-parse HEAD)
  # Without a branch of its own: the last commit.
  if [ "$base" = "$(git rev-parse HEAD)" ] && git diff --quiet HEAD; then
    base=$(git rev-parse -q --verify HEAD~1 || git rev-parse HEAD)
  fi
fi
# Sources of both lists, the changed and the compiled ones.
mapfile -t files < <(
  comm -12 \
    <(if [ $all = yes ]; then git ls-files '*.cpp'; else git diff --name-only --diff-filter=d "$base" -- '*.cpp'; fi | sort) \
    <(python3 -c 'import json, os
for entry in json.load(open("build/dev/compile_commands.json")): print(os.path.relpath(entry["file"]))' | sort -u)
)
left_out=("${files[@]:most}")
files=("${files[@]:0:most}")
if [ ${#files[@]} -gt 0 ]; then
  printf '%s\n' "${files[@]}" |
    xargs -P "$(nproc)" -n 1 "$tidy" -p build/dev --quiet --extra-arg=-Wno-unknown-warning-option \
      2> >(grep -Ev '^[0-9]+ warnings? (and [0-9]+ errors? )?generated' >&2)
fi
echo "tidy: ${#files[@]} sources are clean${base:+ of those that changed since ${base:0:12}}"
[ ${#left_out[@]} -eq 0 ] || echo "tidy: left out ${#left_out[@]} more: ${left_out[*]}"
