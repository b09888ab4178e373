#!/usr/bin/env bash
# What a cluster does to a training: every case of tests/cluster under mpirun (over ssh, between network namespaces) and
# under Debian's Slurm on the same hosts, then with --soak an hour of faults. Root only. Further arguments go to
# tests/cluster/cases.py, for example --launcher srun --case kill.
set -euo pipefail
cd "$(dirname "$0")/.."
soak=no
if [ "${1:-}" = --soak ]; then
  soak=yes
  shift
fi
if [ "$(id -u)" != 0 ]; then
  echo "skipped: only root makes network namespaces"
  exit 77
fi
scripts/setup.sh cluster
cmake --preset cpu >/dev/null
cmake --build --preset cpu --target sparsebalance sparsebalance_mpi
program=build/cpu/src/cli/sparsebalance
if [ ! -x build/kubernetes-validate/bin/kubernetes-validate ]; then
  python3 -m venv build/kubernetes-validate
  build/kubernetes-validate/bin/pip install --quiet kubernetes-validate
fi
build/kubernetes-validate/bin/kubernetes-validate --strict --quiet examples/cluster-kubernetes.yml
tests/cluster/cases.py --program $program "$@"
if [ $soak = yes ]; then
  tests/cluster/soak.py --program $program
fi
