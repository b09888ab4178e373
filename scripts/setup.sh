#!/usr/bin/env bash
# Installs missing Debian packages: those of a tier and of the tiers before it.
#   scripts/setup.sh [run|test|ci|cluster]  run: what scripts/quickstart.sh needs (without argument)
#                                          test: what scripts/test.sh and scripts/test-python.sh need besides
#                                          ci: what .ci/run and scripts/fuzz.sh need besides
#                                          cluster: what scripts/test-cluster.sh needs besides: Slurm
#   scripts/setup.sh --list [TIER]     prints the names and installs nothing
# Returns at once when nothing is missing; where it may not install (no root, no sudo) it prints what to install and stops.
set -euo pipefail

run=(
  g++ cmake ninja-build
  libopenblas-dev libopenmpi-dev openmpi-bin
  libfmt-dev libspdlog-dev libcli11-dev libyaml-cpp-dev nlohmann-json3-dev libpcre2-dev libicu-dev
  zlib1g-dev libzstd-dev
)
test=(
  ccache git python3 python3-venv python3-dev
  libgtest-dev libgmock-dev
)
ci=(clang clang-format clang-tidy libclang-rt-14-dev iproute2 openssh-client openssh-server)
cluster=(slurmctld slurmd slurm-client munge iptables)

list=no
if [ "${1:-}" = --list ]; then
  list=yes
  shift
fi
case "${1:-run}" in
  run) packages=("${run[@]}") ;;
  test) packages=("${run[@]}" "${test[@]}") ;;
  ci) packages=("${run[@]}" "${test[@]}" "${ci[@]}") ;;
  cluster) packages=("${run[@]}" "${test[@]}" "${ci[@]}" "${cluster[@]}") ;;
  *)
    echo "usage: scripts/setup.sh [--list] [run|test|ci|cluster]" >&2
    exit 2
    ;;
esac
if [ $list = yes ]; then
  printf '%s\n' "${packages[@]}"
  exit 0
fi

if ! command -v dpkg-query >/dev/null; then
  echo "setup: not a Debian-like system; install the equivalents of these packages and continue:" >&2
  printf '  %s\n' "${packages[@]}" >&2
  # Where everything is there under other names, the build finds it; it says what it misses otherwise.
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

install=(apt-get install -y --no-install-recommends "${missing[@]}")
if [ "$(id -u)" = 0 ]; then
  as_root=(env DEBIAN_FRONTEND=noninteractive)
elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
  as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
else
  echo "setup: these packages are missing and only root can install them. As root:" >&2
  echo "  apt-get update && ${install[*]}" >&2
  exit 1
fi
echo "setup: installing ${missing[*]}"
"${as_root[@]}" apt-get update
"${as_root[@]}" "${install[@]}"
