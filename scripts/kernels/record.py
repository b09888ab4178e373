"""The record of every kernel, docs/results/kernels.tsv, and what a build has beside it.

Above its table the record names the toolkit and, oldest first, the commits at which figures were measured. `measured`
of a kernel has a digit for each of those: 1 where its machine code was then what it is now."""

import dataclasses
import re

from kernels import cubin

MEASURED_ON = "90a"  # an H200: every published figure is of one, and none of kernels for other GPUs
MORE_REGISTERS, MORE_SPILLS = 8, 16  # what a kernel may take more of without --allow-growth: per thread; bytes
FIGURES = ("registers", "stack", "spill_stores", "spill_loads", "shared", "instructions")
COLUMNS = ("arch", "source", "kernel", "code", *FIGURES, *cubin.KINDS, "measured")


@dataclasses.dataclass
class Row:
    arch: str
    source: str  # from src/
    kernel: str
    code: str
    figures: dict
    measured: str = ""

    @property
    def key(self):
        return self.arch, self.source, self.kernel

    @property
    def base(self):
        """Of all instances of a template."""
        return self.kernel.split("<")[0].split("::")[-1]

    def line(self):
        return "\t".join([*self.key, self.code, *map(str, self.figures.values()), self.measured])


@dataclasses.dataclass
class Record:
    toolkit: str
    measured: dict  # {commit: date}, oldest first
    rows: dict  # {(arch, source, kernel): Row}

    def architectures(self):
        return sorted({row.arch for row in self.rows.values()})

    def text(self):
        lines = [f"# toolkit {self.toolkit}"]
        lines += [f"# measured {commit} {date}" for commit, date in self.measured.items()]
        lines += ["\t".join(COLUMNS), *(self.rows[key].line() for key in sorted(self.rows))]
        return "\n".join(lines) + "\n"


class Mismatch(Exception):
    """Something that is not as the record or a build of the project has it."""


def parsed(text):
    toolkit, measured, rows = "", {}, {}
    for line in text.splitlines():
        words = line.split("\t")
        if line.startswith("# toolkit "):
            toolkit = line.split()[2]
        elif line.startswith("# measured "):
            _, _, commit, date = line.split()
            measured[commit] = date
        elif len(words) != len(COLUMNS):
            raise Mismatch(f"not a line of {len(COLUMNS)} columns: {line}")
        elif words[0] != COLUMNS[0]:
            figures = dict(zip((*FIGURES, *cubin.KINDS), map(int, words[4:-1]), strict=True))
            row = Row(*words[:4], figures, words[-1])
            rows[row.key] = row
    return Record(toolkit, measured, rows)


def source_of(build, path):
    """attention/gpu/hopper/forward.cu, of its object file in a build's folder."""
    return re.sub(r"CMakeFiles/[^/]+\.dir/", "", path.relative_to(build / "src").as_posix()).removesuffix(".o")


def built(build, sources=None):
    """The record that a build's folder would make; of the files that sources names, where it is given."""
    toolkits, rows, seen = set(), {}, set()
    for path in sorted(build.glob("src/**/*.cu.o")):
        source = source_of(build, path)
        if sources is not None and source not in sources:
            continue  # left from a file that is gone
        seen.add(source)
        try:
            for data in cubin.cubins(path.read_bytes()):
                code = cubin.Cubin(data)
                toolkits.add(code.toolkit)
                for kernel in code.kernels():
                    figures = {name: getattr(kernel, name) for name in FIGURES} | kernel.counts
                    row = Row(kernel.architecture, source, kernel.name, kernel.code, figures)
                    if row.key in rows:
                        raise cubin.Unreadable(f"two kernels are called {kernel.name}")
                    rows[row.key] = row
        except cubin.Unreadable as error:
            raise Mismatch(f"{path}: {error}") from None
    missing = sorted(set(sources or ()) - seen)
    if missing or not rows:
        raise Mismatch(f"{build} has no object of {missing[0] if missing else 'any kernel'}: scripts/compile-cuda.sh "
                       "builds them in build/cuda")  # fmt: skip
    if len(toolkits) > 1:
        raise Mismatch(f"{build} has objects of several toolkits ({', '.join(sorted(toolkits))}): build it anew")
    return Record(toolkits.pop(), {}, rows)


def growth(old, new):
    """What a kernel takes more of, beyond the bounds."""
    more = {name: new.figures[name] - old.figures[name] for name in FIGURES}
    found = []
    if more["registers"] > MORE_REGISTERS:
        found.append(f"{old.figures['registers']} -> {new.figures['registers']} registers")
    if more["spill_stores"] + more["spill_loads"] > MORE_SPILLS:
        before, after = ("{spill_stores} + {spill_loads}".format(**row.figures) for row in (old, new))
        found.append(f"{before} -> {after} bytes of spills")
    return ", ".join(found)


def compared(record, build):
    """What differs, a line for each kernel, and apart from that what grew beyond the bounds. Of the architectures that
    both have."""
    differing, grown = [], []
    both = set(record.architectures()) & set(build.architectures())
    for key in sorted(record.rows.keys() | build.rows.keys()):
        if key[0] not in both:
            continue
        name, old, new = f"{key[1]}: {key[2]} (sm_{key[0]})", record.rows.get(key), build.rows.get(key)
        if old is None or new is None:
            differing.append(f"{name}: {'not on record' if old is None else 'on record, but gone'}")
            continue
        changed = [f"{what} {value} -> {new.figures[what]}" for what, value in old.figures.items()
                   if value != new.figures[what]]  # fmt: skip
        if old.code != new.code or changed:
            what = "its machine code changed" if old.code != new.code else "the same machine code, but"
            differing.append(f"{name}: {what}" + (f" ({', '.join(changed)})" if changed else ""))
        if more := growth(old, new):
            grown.append(f"{name}: {more}")
    return differing, grown


def renewed(record, build):
    """The build's rows; what was measured of a machine code stays with it, whatever the kernel is called now."""
    same_toolkit = record.toolkit == build.toolkit
    measured = record.measured if same_toolkit else {}
    digits = {(row.arch, row.code): row.measured for row in record.rows.values()} if same_toolkit else {}
    rows = {key: dataclasses.replace(row, measured=digits.get((row.arch, row.code), "0" * len(measured)))
            for key, row in build.rows.items()}  # fmt: skip
    return Record(build.toolkit, measured, rows)


def with_measured(record, commit, date, build):
    """The record, knowing what the kernels were at one more commit at which figures were measured."""
    if build.toolkit != record.toolkit:
        raise Mismatch(f"the build of {commit} is by CUDA {build.toolkit}, the record by {record.toolkit}")
    measured = dict(sorted({**record.measured, commit: date}.items(), key=lambda item: item[1]))
    place, again = list(measured).index(commit), commit in record.measured
    codes = {row.code for row in build.rows.values() if row.arch == MEASURED_ON}
    rows = {}
    for key, row in record.rows.items():
        digit = "1" if row.arch == MEASURED_ON and row.code in codes else "0"
        rows[key] = dataclasses.replace(row, measured=row.measured[:place] + digit + row.measured[place + again :])
    return Record(record.toolkit, measured, rows)


def measured_at(record, row, commit):
    """Whether the kernel is today what it was at a commit at which figures were measured."""
    return row.measured[list(record.measured).index(commit)] == "1"
