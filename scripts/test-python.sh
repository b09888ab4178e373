#!/usr/bin/env bash
# Installs the Python package into build/venv (made where it is missing) and runs its tests. Those that need torch run where
# it is installed there: scripts/test-python.sh --torch installs torch, transformers, accelerate, peft and lm_eval first
# (PIP_INDEX_URL chooses PyTorch's index of CPU builds, which are smaller). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv
[ -x $venv/bin/python ] || python3 -m venv $venv
pip=($venv/bin/python -m pip --disable-pip-version-check -q)
"${pip[@]}" install "scikit-build-core>=1.1" "nanobind>=3.1" numpy pytest pandas
if [ "${1:-}" = --torch ]; then
  shift
  "${pip[@]}" install torch transformers accelerate peft lm_eval
fi
# As the presets call the compiler, so that the compiler cache serves both.
CXX=${CXX:-c++} "${pip[@]}" install --no-build-isolation .
$venv/bin/python -c 'import torch, transformers' 2>/dev/null ||
  echo "torch and transformers are not in $venv: their tests are left out (scripts/test-python.sh --torch installs them)"
$venv/bin/python -m pytest -q python/tests "$@"
