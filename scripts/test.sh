#!/usr/bin/env bash
# Set-up, build, and every test that needs no GPU. Further arguments go to ctest, for example -L fast or -R core.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${SB_PRESET:-cpu}

scripts/setup.sh
cmake --preset "$preset"
cmake --build --preset "$preset"
ctest --preset "$preset" -LE gpu -j "$(nproc)" "$@"
