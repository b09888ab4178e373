#!/usr/bin/env python3
"""Records what a program does today, so that it can be compared with what it does after a change: losses of every
layout and pattern, gradients, plans, memory plans, the tables of docs/results.

usage: record-results.py --program P [--out FILE] [--only PREFIX] [--jobs N]   records, into build/record/COMMIT.json
       record-results.py --compare A B [--only PREFIX] [--intended FILE]       fails where two records differ
       record-results.py --list                                                names the cases
       record-results.py --self-test

All settings are written out (scripts/results/settings.py), so that a changed default changes nothing here. A record
that was interrupted goes on with the same command. Everything is compared to the bit; times are left out. --intended
names a file with lines `PATTERN -- reason`, the pattern as in a shell, over what the comparison prints before the
values; a reason without a difference fails, too. Two records compare only if kernels, compiler and scripts/results are
the same."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import resource
import sys
import tempfile
import time

from results import commands, compare, header, memory_plans, self_test, settings, trainings
from results.case import RecordError

ROOT = pathlib.Path(__file__).resolve().parent.parent
WRITTEN = frozenset({**settings.BASE, **settings.ADAPTERS, **settings.YARN, "train.output_dir": ""})


def all_cases():
    return sorted([*commands.cases(), *memory_plans.cases(), *trainings.cases()], key=lambda case: case.name)


def read(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: no record that can be read: {error}") from None


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)


def begun(path, made_by):
    """What an earlier, interrupted run of the same program left."""
    if not path.exists():
        return {"header": made_by, "cases": {}}
    found = read(path)
    same = [{key: value for key, value in of.items() if key != "commit"} for of in (found.get("header", {}), made_by)]
    if same[0] != same[1]:
        raise RecordError(f"{path}: a record of another program, machine or version of scripts/results; remove it, or "
                          "choose another --out")
    return found


def run_case(case, program):
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        return case.name, case.run(program, pathlib.Path(folder))


def record(program, path, only, jobs):
    start = time.monotonic()
    content = begun(path, header.header(program))
    content["cases"]["settings"] = header.settings_case(program, WRITTEN, commands.WRITTEN)
    left = [case for case in all_cases() if case.name.startswith(only) and case.name not in content["cases"]]
    if not left and not any(name.startswith(only) for name in content["cases"]):
        raise RecordError(f"no case begins with '{only}'; --list names them")
    saved = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(run_case, case, program) for case in left]
        try:
            for number, done in enumerate(concurrent.futures.as_completed(runs), 1):
                name, values = done.result()
                content["cases"][name] = values
                if time.monotonic() - saved > 5:
                    write(path, content)
                    saved = time.monotonic()
                    print(f"{number} of {len(left)} cases: {name}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
            write(path, content)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    refused = sorted(name for name, values in content["cases"].items() if "error" in values)
    for name in refused:
        print(f"refused: {name}: {content['cases'][name]['error']}")
    values = sum(map(len, content["cases"].values()))
    print(f"{path}: {len(content['cases'])} cases, {values} values, {len(refused)} refused; {len(left)} run now in "
          f"{time.monotonic() - start:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of the processor")
    return 0


def compared(paths, only, intended):
    patterns = compare.intended(intended.read_text(encoding="utf-8")) if intended else ()
    lines, good = compare.report(*map(read, paths), only, patterns)
    print("\n".join(lines))
    return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--program", type=pathlib.Path)
    mode.add_argument("--compare", nargs=2, type=pathlib.Path)
    mode.add_argument("--list", action="store_true")
    mode.add_argument("--self-test", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--intended", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    try:
        if arguments.self_test:
            return self_test.run()
        if arguments.list:
            print("\n".join(case.name for case in all_cases()))
            return 0
        if arguments.compare:
            return compared(arguments.compare, arguments.only, arguments.intended)
        program = header.opened(arguments.program)
        commit = header.commit(program.path)
        if not (arguments.out or commit):
            raise RecordError("the program's commit cannot be told (its sources have moved on since it was built, or "
                              "are elsewhere): build it again, or name a file with --out")
        return record(program, arguments.out or ROOT / f"build/record/{commit}.json", arguments.only, arguments.jobs)
    except RecordError as error:
        print(f"record-results: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
