#!/usr/bin/env bash
# What a newcomer and a new machine wait for: clones the commit that is checked out, each time into a new folder and with an
# empty compiler cache, runs the quickstart, the tests and everything that must hold before a change goes in, and prints wall
# and processor time of each.
#   scripts/first-hour.sh [quickstart] [test] [ci]     all three without arguments: an hour on two cores
# Nothing else should run meanwhile. The logs stay in build/first-hour.
set -euo pipefail
cd "$(dirname "$0")/.."
source=$PWD
logs=$PWD/build/first-hour
[ $# -gt 0 ] || set -- quickstart test ci
mkdir -p "$logs"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
  echo "note: uncommitted changes are not in the clone" >&2
fi
# So that the times are those of building and running, not of a network.
scripts/setup.sh ci

TIMEFORMAT='%R %U %S'
table=
for name in "$@"; do
  case $name in
    quickstart) command=scripts/quickstart.sh ;;
    test) command=scripts/test.sh ;;
    ci) command=.ci/run ;;
    *) echo "$name: no such part; see the top of $0" >&2; exit 2 ;;
  esac
  git clone -q "$source" "$work/clone"
  [ ! -e "$source/../shared" ] || ln -s "$(realpath "$source/../shared")" "$work/shared"
  echo "== $command (log: build/first-hour/$name.log)"
  status=0
  {
    time (cd "$work/clone" && CCACHE_DIR=$work/cache bash "$command" >"$logs/$name.log" 2>&1 </dev/null)
  } 2>"$work/time" || status=$?
  tail -4 "$logs/$name.log"
  read -r wall user system < <(tail -1 "$work/time")
  printf -v row '%-22s %6.0f s %8.0f s  %s\n' "$command" "$wall" "$(awk "BEGIN { print $user + $system }")" \
    "$([ $status = 0 ] && echo passed || echo "FAILED ($status)")"
  table+=$row
  rm -rf "$work/clone" "$work/cache" "$work/shared"
done
printf '\n%s, %d cores, commit %s\n' "$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1)" "$(nproc)" \
  "$(git rev-parse --short HEAD)"
printf '%-22s %8s %10s\n%s' "from an empty cache" "wall" "processor" "$table"
[[ $table != *FAILED* ]]
