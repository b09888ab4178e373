#!/usr/bin/env bash
# Fails when a source file is not as clang-format writes it. `scripts/check-format.sh --fix` formats them.
set -euo pipefail
cd "$(dirname "$0")/.."

# Versions differ in taste; this is Debian 12's.
format=$(command -v clang-format-14 || command -v clang-format)
mapfile -t files < <(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
if [ "${1:-}" = --fix ]; then
  "$format" -i "${files[@]}"
else
  "$format" --dry-run -Werror "${files[@]}"
  echo "format: ${#files[@]} files are as clang-format writes them"
fi
