"""A case of the record: one or a few runs of the program, and what they printed and wrote as {key: value}."""

import dataclasses
import json
import pathlib
import re
import resource
import subprocess
from typing import Callable

MOST_SECONDS = 300


class RecordError(Exception):
    """The record cannot be made, or two records cannot be compared."""


@dataclasses.dataclass(frozen=True)
class Program:
    path: pathlib.Path
    options: frozenset  # of run.yaml
    arguments: dict  # {sub-command: options of its command line}

    def known(self, settings):
        """Without the options that this program does not have: those are listed once, in the case `settings`."""
        return {key: value for key, value in settings.items() if key in self.options}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    run: Callable  # (program, empty folder) -> {key: value}


def limit_address_space(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def run(command, folder, address_space=None, given=None):
    """Exit code, standard output and standard error."""
    before = (lambda: limit_address_space(address_space)) if address_space else None
    try:
        done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False,
                              timeout=MOST_SECONDS, preexec_fn=before, input=given)
    except subprocess.TimeoutExpired:
        raise RecordError(f"{' '.join(map(str, command))}: took longer than {MOST_SECONDS} s, so nothing was recorded "
                          "of it; run the same command on a quieter machine to go on") from None
    return done.returncode, done.stdout, done.stderr


def refusal(code, errors):
    """What the record has of a run that failed: a program that can no longer do something differs by it."""
    lines = [line for line in errors.splitlines() if re.search(r"error: |ended the job: |internal error", line)]
    return {"exit code": code, "error": lines[0] if lines else errors.strip()[-300:]}


def without_times(tree, is_time):
    if isinstance(tree, dict):
        return {key: without_times(value, is_time) for key, value in tree.items() if not is_time(key)}
    if isinstance(tree, list):
        return [without_times(value, is_time) for value in tree]
    return tree


def flat(tree, before=""):
    """{"a": {"b": [1]}} as {"a/b/0": 1}; what is empty stays, so that it can differ from what is missing."""
    if isinstance(tree, (dict, list)) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: value for name, part in items for key, value in flat(part, f"{before}/{name}").items()}
    return {before[1:]: tree}


def json_lines(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
