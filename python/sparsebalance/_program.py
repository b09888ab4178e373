"""The command line tool that the package carries."""

import os
import pathlib
import sys

PROGRAM = pathlib.Path(__file__).parent / "bin" / "sparsebalance"


def main() -> None:
    os.execv(PROGRAM, ["sparsebalance", *sys.argv[1:]])
