#!/usr/bin/env bash
# Hardware counters of one attention kernel in one case of its benchmark, as OUTPUT.txt and, by source line, OUTPUT.csv.
# KERNEL is a pattern of its name, CASE as the benchmark prints it; needs the cuda build and Nsight Compute (ncu).
#   scripts/hopper-profile.sh KERNEL CASE OUTPUT
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -ne 3 ]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
ncu --clock-control none -k "regex:$1" -s 2 -c 1 --set full --import-source no -f -o "$3" \
  build/cuda/bench/attention/attention_hopper_bench quick "$2" >/dev/null
ncu --import "$3.ncu-rep" --page details >"$3.txt"
ncu --import "$3.ncu-rep" --page source --csv --print-units base >"$3.csv"
rm "$3.ncu-rep"
