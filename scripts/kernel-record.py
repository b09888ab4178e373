#!/usr/bin/env python3
"""What every CUDA kernel is in machine code (registers, spills, instructions by kind, a hash), read from the objects of
a build, kept in docs/results/kernels.tsv and kernels.md, and held against the figures that rest on it.

usage: kernel-record.py --check [BUILD]            fails where a build (build/cuda) is not what the record has
       kernel-record.py --write [--allow-growth] [BUILD]   renews the record
       kernel-record.py --measured COMMIT BUILD    adds the kernels of a commit at which figures were measured
       kernel-record.py --pages [--fix]            fails where a page of docs/results does not say which kernels changed
                                                   under its figures; with --fix it says so afterwards
       kernel-record.py --dump [BUILD]             prints every kernel of a build; two dumps compare with diff
       kernel-record.py --self-test

The hash depends neither on the kernel's place in its file, nor on the file's path, nor on line numbers. Only objects
that are there are read; nothing is compiled."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

from kernels import pages, record, self_test, table

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE, PAGE = ROOT / "docs/results/kernels.tsv", ROOT / "docs/results/kernels.md"


def sources():
    return {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.cu")}


def on_record():
    if not TABLE.exists():
        raise record.Mismatch(f"{TABLE} is not there: --write makes it")
    return record.parsed(TABLE.read_text(encoding="utf-8"))


def save(known):
    TABLE.write_text(known.text(), encoding="utf-8")
    PAGE.write_text(table.text(known, record.MORE_REGISTERS, record.MORE_SPILLS), encoding="utf-8")


def report(lines, what):
    for line in lines:
        print(f"kernel-record: {what}: {line}")


def check(folder):
    if not folder.exists() and shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        print("kernel-record: no nvcc here and nothing built: machine code was NOT CHECKED")
        return 0
    known, build = on_record(), record.built(folder, sources())
    if known.toolkit != build.toolkit:
        print(f"kernel-record: the record is of CUDA {known.toolkit}, {folder} of CUDA {build.toolkit}: NOT CHECKED")
        return 0
    for arch in sorted(set(known.architectures()) - set(build.architectures())):
        print(f"kernel-record: {folder} has no kernels for sm_{arch}: those are NOT CHECKED")
    for arch in sorted(set(build.architectures()) - set(known.architectures())):
        print(f"kernel-record: the record has no kernels for sm_{arch}: those of {folder} are NOT CHECKED")
    differing, grown = record.compared(known, build)
    report(differing, "differs from the record")
    report(grown, "GREW beyond the bounds")
    if differing:
        print("kernel-record: if all of this is meant: scripts/kernel-record.py --write, then --pages")
        return 1
    count = sum(row.arch in build.architectures() for row in known.rows.values())
    print(f"kernel-record: {count} kernels are on record as they are (CUDA {known.toolkit})")
    return 0


def write(folder, allow_growth):
    build = record.built(folder, sources())
    known = on_record() if TABLE.exists() else record.Record(build.toolkit, {}, {})
    if missing := sorted(set(known.architectures()) - set(build.architectures())):
        raise record.Mismatch(f"{folder} has no kernels for sm_{missing[0]}, which the record has: configure it with "
                              "-DSB_CUDA_ARCHITECTURES=\"80;90a\"")  # fmt: skip
    differing, grown = record.compared(known, build)
    report(differing, "renewed")
    report(grown, "GREW beyond the bounds")
    if grown and not allow_growth:
        print("kernel-record: nothing was written; --allow-growth takes it")
        return 1
    save(record.renewed(known, build))
    return 0


def measured(commit, folder):
    show = ["git", "-C", str(ROOT), "show", "--no-patch", "--date=format-local:%Y-%m-%dT%H:%M:%S", "--format=%h %cd"]
    run = subprocess.run([*show, "--abbrev=7", commit], capture_output=True, text=True, check=False, env={"TZ": "UTC"})
    if run.returncode != 0:
        raise record.Mismatch(f"{commit} is no commit here: {run.stderr.strip()}")
    save(record.with_measured(on_record(), *run.stdout.split(), record.built(folder)))
    return 0


def check_pages(fix):
    known, found, unknown, count = on_record(), [], {}, 0
    if PAGE.read_text(encoding="utf-8") != table.text(known, record.MORE_REGISTERS, record.MORE_SPILLS):
        found.append(f"{PAGE.relative_to(ROOT)} is not what {TABLE.name} gives: --write makes both")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if fix and (right := pages.mended(known, text)) != text:
            path.write_text(right, encoding="utf-8")
            text = right
        count += len(pages.PARAGRAPH.findall(text))
        page = path.relative_to(ROOT)
        found += [f"{page}: {line}" for line in pages.problems(known, text, path.parent == PAGE.parent)]
        for commit in pages.not_compared(known, text):
            unknown.setdefault(commit, set()).add(str(page))
    for line in found:
        print(f"kernel-record: {line}")
    for commit, of in unknown.items():
        print(f"kernel-record: NOT CHECKED: figures of {commit} ({', '.join(sorted(of))}): the record does not know "
              f"its kernels; compile it, then --measured {commit} ITS_BUILD_FOLDER")  # fmt: skip
    if not found:
        print(f"kernel-record: {count} statements on kernels under published figures are as the record has it")
    return 1 if found else 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    for name in ("--check", "--write", "--pages", "--dump", "--self-test"):
        mode.add_argument(name, action="store_true")
    mode.add_argument("--measured", metavar="COMMIT")
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--allow-growth", action="store_true")
    parser.add_argument("build", type=pathlib.Path, nargs="?", default=ROOT / "build/cuda")
    arguments = parser.parse_args()
    try:
        if arguments.self_test:
            return self_test.run()
        if arguments.pages:
            return check_pages(arguments.fix)
        if arguments.check:
            return check(arguments.build)
        if arguments.write:
            return write(arguments.build, arguments.allow_growth)
        if arguments.measured:
            return measured(arguments.measured, arguments.build)
        print(record.built(arguments.build).text(), end="")
        return 0
    except record.Mismatch as error:
        print(f"kernel-record: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
