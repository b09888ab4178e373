#!/usr/bin/env bash
# Builds the Python module with CUDA in build/cuda, beside what the preset has there already, and runs its tests on the GPU.
# Needs a Python with torch, and nanobind and pytest: those of build/gpu-python/packages serve where the Python has none, and
# the headers of build/gpu-python/include where it has none of its own. Arguments go to pytest; --bench measures after them.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
export PYTHONPATH=$PWD/build/cuda/package${PYTHONPATH:+:$PYTHONPATH}
$python -c 'import nanobind, pytest' 2>/dev/null || PYTHONPATH+=:$PWD/build/gpu-python/packages
bench=no
if [ "${1:-}" = --bench ]; then
  bench=yes
  shift
fi

version=$($python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
headers=$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] || headers=$PWD/build/gpu-python/include/python$version
cmake --preset cuda -DSB_PYTHON=ON -DPython_EXECUTABLE="$(command -v $python)" -DPython_INCLUDE_DIR="$headers" >/dev/null
trap 'cmake --preset cuda -DSB_PYTHON=OFF >/dev/null' EXIT  # who builds there next may have no nanobind
cmake --build --preset cuda --target _core
package=build/cuda/package/sparsebalance
mkdir -p $package
cp python/sparsebalance/*.py build/cuda/python/_core*.so $package
if readelf -d $package/_core*.so | grep -E 'cublas|cudart|torch'; then
  echo "the module must not need these libraries" >&2
  exit 1
fi
$python -m pytest -q -p no:cacheprovider python/tests/test_torch_cuda.py "$@"
[ $bench = no ] || $python bench/peers/transformers_attention.py
