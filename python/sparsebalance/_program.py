"""The command line tool that the package carries."""

import os
import pathlib
import sys

from sparsebalance._core import __build__

_HERE = pathlib.Path(__file__).parent
PROGRAM = _HERE / "bin" / "sparsebalance"


def environment() -> dict[str, str]:
    """What the program runs with: cuBLAS may be there as a package, where the loader does not look by itself."""
    variables = dict(os.environ)
    if "with CUDA" in __build__:
        folders = {str(library.parent) for library in _HERE.parent.glob("nvidia/*/lib/libcublasLt.so*")}
        paths = [path for path in (variables.get("LD_LIBRARY_PATH"), *sorted(folders)) if path]
        if paths:
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    return variables


def main() -> None:
    os.execve(PROGRAM, ["sparsebalance", *sys.argv[1:]], environment())
