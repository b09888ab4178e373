#!/usr/bin/env bash
# Installs the Python package into build/venv (made where it is missing) and runs its tests. Those that need torch run where
# it is installed there: scripts/test-python.sh --torch installs it first, with transformers, accelerate, peft and lm_eval
# (scripts/python-torch.sh); with --try-torch it is no failure that they cannot be had. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh test
venv=build/venv
[ -x $venv/bin/python ] || python3 -m venv $venv
pip=($venv/bin/python -m pip --disable-pip-version-check -q)
"${pip[@]}" install "scikit-build-core>=1.1" "nanobind>=3.1" numpy pytest pandas gguf
case "${1:-}" in
  --torch)
    shift
    scripts/python-torch.sh $venv
    ;;
  --try-torch)
    shift
    if ! scripts/python-torch.sh $venv; then
      echo "torch could not be installed: see above"
      "${pip[@]}" uninstall -y torch # which may be there without what it needs
    fi
    ;;
esac
# As the presets call the compiler, so that the compiler cache serves both.
CXX=${CXX:-c++} "${pip[@]}" install --no-build-isolation .
$venv/bin/python -c 'import torch, transformers, accelerate, peft, lm_eval' 2>/dev/null ||
  echo "NOT TESTED: what needs torch, transformers, accelerate, peft or lm_eval (scripts/test-python.sh --torch installs them)"
$venv/bin/python -m pytest -q python/tests "$@"
$venv/bin/python scripts/real-checkpoint.py --self-test
