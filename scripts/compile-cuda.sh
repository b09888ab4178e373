#!/usr/bin/env bash
# Compiles, without running anything, what the CUDA build has and the CPU build has not: every kernel and every host file
# that differs, and what those targets have to wait for (the program itself, whose other files come from the compiler cache
# after a CPU build). Needs nvcc and the toolkit, but no GPU. Says so and ends well where there is no nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! nvcc=$(command -v "${CUDACXX:-nvcc}"); then
  echo "compile-cuda: no nvcc here: the CUDA code was NOT compiled"
  exit 0
fi
scripts/setup.sh test
cmake --preset cpu >/dev/null
# Hopper, and the portable kernels for GPUs from compute capability 8.0 on.
cmake --preset cuda -DSB_CUDA_ARCHITECTURES="80;90a" >/dev/null
# The object files of sources that the CPU build does not compile, or compiles otherwise. The compile commands of the CPU
# build serve as they are written at configuration; nothing of it is built.
python3 - build/cpu build/cuda >build/cuda/cuda_objects.txt <<'PYTHON'
import json, pathlib, re, sys

def commands(folder):
    entries = json.loads(pathlib.Path(folder, "compile_commands.json").read_text(encoding="utf-8"))
    # The same words for the same compilation, whichever build folder it is in and whether CUDA's headers are in reach.
    plain = [re.sub(r" -isystem \S+|\S*" + re.escape(folder) + r"(?=/)", "", entry["command"]) for entry in entries]
    return {re.search(r" -o (\S+)", command)[1]: command for command in plain}

cpu, cuda = (commands(folder) for folder in sys.argv[1:])
print(*(output for output, command in cuda.items() if cpu.get(output) != command), sep="\n")
PYTHON
echo "compile-cuda: $(wc -l <build/cuda/cuda_objects.txt) files with $nvcc ($("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/CUDA \1/p'))"
xargs cmake --build --preset cuda --target <build/cuda/cuda_objects.txt
