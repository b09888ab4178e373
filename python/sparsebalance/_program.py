"""The command line tool that the package carries."""

import os
import pathlib
import sys

from sparsebalance._core import __build__

_HERE = pathlib.Path(__file__).parent
PROGRAM = _HERE / "bin" / "sparsebalance"


def main() -> None:
    if "with CUDA" in __build__:  # cuBLAS may be there as a package, where the loader does not look by itself
        folders = {str(library.parent) for library in _HERE.parent.glob("nvidia/*/lib/libcublasLt.so*")}
        paths = [path for path in (os.environ.get("LD_LIBRARY_PATH"), *sorted(folders)) if path]
        if folders:
            os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    os.execv(PROGRAM, ["sparsebalance", *sys.argv[1:]])
