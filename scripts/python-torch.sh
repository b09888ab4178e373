#!/usr/bin/env bash
# Installs what the torch half of the Python tests needs (torch, transformers, accelerate, peft, lm_eval) into the virtual
# environment that is named. PyPI's torch for Linux is built for GPUs and takes 5.4 GB with the packages it asks for. Where
# there is no GPU it comes without most of them: libraries that the loader wants and that nothing calls on a CPU are replaced
# by ones that have the names alone, and end the process with a message when they are called.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:?usage: scripts/python-torch.sh ENVIRONMENT}/bin/python
pip=($python -m pip --disable-pip-version-check -q --retries 2)

if $python - 2>/dev/null <<'EOF'
import importlib.util
import torch
assert all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft", "lm_eval")))
EOF
then
  exit 0
fi
if [ -e /dev/nvidiactl ]; then
  "${pip[@]}" install torch transformers accelerate peft lm_eval
  exit 0
fi

"${pip[@]}" install --no-deps torch accelerate peft
packages=$(dirname "$($python -c 'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])')")
# Of what torch asks for: the packages for all systems, and of those for GPUs the small ones that importing it calls.
mapfile -t needed < <($python - <<'EOF'
import importlib.metadata
import re

for requirement in importlib.metadata.requires("torch"):
    name, _, condition = requirement.partition(";")
    if not condition:
        print(name)
    elif name.startswith("cuda-toolkit"):
        print(re.sub(r"\[.*\]", "[cudart,cufile,cupti]", name))
EOF
)
# (pip calls it broken without the others.)
"${pip[@]}" install --no-warn-conflicts transformers lm_eval psutil "${needed[@]}"

# They go where the loader looks last, so that packages that are installed later come first.
own=$packages/torch/lib
source=$(mktemp --suffix .c)
trap 'rm -f "$source"' EXIT
{
  echo '#include <stdio.h>'
  echo '#include <stdlib.h>'
  echo '#define NAME(name) void name(void) { fputs(#name ": this torch has no libraries for GPUs\n", stderr); abort(); }'
  nm -D --undefined-only "$own"/libtorch*.so |
    sed -n 's/^ *U \(\(cublas\|cudnn\|cufft\|cusolver\|cusparse\|nccl\|nvrtc\|nvshmem\)\w*\).*/NAME(\1)/p' | sort -u
} >"$source"
for library in $(readelf -d "$own"/libtorch*.so | sed -n 's/.*NEEDED.*\[\(lib\(cu\|nccl\|nv\)[^]]*\)\]/\1/p' | sort -u); do
  if ! compgen -G "$packages/nvidia/*/lib/$library" >/dev/null; then
    ${CC:-cc} -shared -fPIC -O1 -Wl,-soname,"$library" "$source" -o "$own/$library"
  fi
done
if ! $python -c 'import torch'; then
  echo "torch cannot be imported without its libraries for GPUs: installing them"
  "${pip[@]}" install torch
fi
