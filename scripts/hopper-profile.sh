#!/usr/bin/env bash
# Hardware counters of one kernel in one benchmark case: scripts/hopper-profile.sh KERNEL "CASE" OUTPUT-PREFIX
set -euo pipefail
cd "$(dirname "$0")/.."
ncu --clock-control none -k regex:$1 -s 2 -c 1 --set full --import-source no -f -o "$3" \
  build/hopper/attention_bench quick "$2" >/dev/null
ncu --import "$3.ncu-rep" --page details >"$3.txt"
ncu --import "$3.ncu-rep" --page source --csv --print-units base >"$3.csv"
rm "$3.ncu-rep"
