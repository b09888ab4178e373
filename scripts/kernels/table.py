"""docs/results/kernels.md, of the record."""

import collections
import textwrap

from kernels import cubin

HEAD = """# Kernels in machine code

<!-- kernels: none: this page is made by scripts/kernel-record.py --write -->

What {count} kernels are in the machine code of CUDA {toolkit}, by source file. Instances of a template share a line,
with the least and the most of them; [kernels.tsv](kernels.tsv) has each, with the hash of its code.

| column | meaning |
| --- | --- |
| registers | of a thread |
| spills | bytes that all instructions together store in and load from local memory, as `ptxas -v` counts spills |
| shared | static shared memory, bytes; the Hopper kernels take theirs at the launch |
| instructions | of the kernel, each counted once wherever it stands |
| wgmma, mma | tensor core instructions: of warpgroups, of warps |
| bulk | copies and sums by the copy engine (`UTMALDG`, `UTMAREDG`, `UBLKCP`, `UBLKRED`) |
| mbarrier, bar | operations on barriers in shared memory; barriers of the block |
| measured | the first of the commits at which figures were measured with the machine code that all instances have now |

## How to repeat it

    scripts/compile-cuda.sh
    scripts/kernel-record.py --check

compares a build with this record and fails where they differ. After a change that is meant, `--write` renews both
files (it refuses {registers} registers or {spills} bytes of spills more without `--allow-growth`). Pages whose figures rest on a
kernel that changed then have to say so: `--pages` fails until they do, `--pages --fix` renews what they say. Where new
figures were measured: `--measured COMMIT BUILD`, with the folder in which that commit was built.

{measured}

## What limits it

- The hash is of instructions and constants. How a kernel is launched, with how much dynamic shared memory, and which
  kernel is chosen is host code, which this record does not see; nor is cuBLASLt's.
- Another toolkit makes other machine code of the same source; nothing is compared then, and the check says so.
"""
COLUMNS = ("registers", "spills", "shared", "instructions", *cubin.KINDS)


def span(values):
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def oldest(rows, measured):
    """The first of the commits at which all of these kernels were what they are now."""
    for place, commit in enumerate(measured):
        if all(row.measured[place] == "1" for row in rows):
            return commit
    some = sum("1" in row.measured for row in rows)
    return f"{some} of {len(rows)} at some commit" if some else "never"


def line(kernel, rows, measured):
    of = [row.figures for row in rows]
    values = [[f["registers"] for f in of], [f["spill_stores"] + f["spill_loads"] for f in of],
              [f["shared"] for f in of], [f["instructions"] for f in of],
              *([f[kind] for f in of] for kind in cubin.KINDS)]  # fmt: skip
    name = f"`{kernel}`" + (f" × {len(rows)}" if len(rows) > 1 else "")
    return f"| {name} | {' | '.join(map(span, values))} | {oldest(rows, measured)} |"


def text(known, registers, spills):
    commits = ", ".join(f"{commit} ({date[:10]})" for commit, date in known.measured.items()) or "no commit yet"
    measured = textwrap.fill(f"Figures were measured at {commits}.", 120)
    head = HEAD.format(count=len(known.rows), toolkit=known.toolkit, registers=registers + 1, spills=spills + 1,
                       measured=measured)  # fmt: skip
    lines = [head]
    for arch in known.architectures():
        lines.append(f"## sm_{arch}\n")
        files = collections.defaultdict(lambda: collections.defaultdict(list))
        for key in sorted(known.rows):
            if key[0] == arch:
                files[key[1]][known.rows[key].base].append(known.rows[key])
        for source, kernels in files.items():
            lines += [f"**{source}**\n", "| kernel | " + " | ".join((*COLUMNS, "measured")) + " |",
                      "| --- |" + " ---: |" * len(COLUMNS) + " --- |"]  # fmt: skip
            lines += [line(kernel, rows, known.measured) for kernel, rows in kernels.items()]
            lines.append("")
    return "\n".join(lines)
