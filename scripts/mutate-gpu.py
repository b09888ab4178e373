#!/usr/bin/env python3
"""Are defects of the GPU code found by its tests on the software device? Makes one mutant of every wait, arrive, barrier,
fence, event, stream argument and bound of an index in the CUDA sources and the host code around them (tests/softgpu/mutate),
runs the tests that come to that place, and writes who found it: results, a sanitizer, or nobody.

usage: mutate-gpu.py [--sample N [--seed S]] [--only PATH] [--kind KIND] [--configurations NAMES]
                                                         runs; what is in the log is not run again
       mutate-gpu.py --list                              prints every site
       mutate-gpu.py --patch FILE...                     runs changes of your own, as `git diff` writes them, one at a time
       mutate-gpu.py --table                             prints the table of what the log has
       mutate-gpu.py --self-test

Fails where a mutant survives that tests/softgpu/mutate/survivors.tsv does not explain. A mutant counts only where the
unchanged sources pass the same case in the same configuration. The log (build/mutants/log.jsonl) grows line by line, so
that an interrupted run goes on where it was; a mutant is run again when its file has changed. Which cases are run for a
file's mutants says tests/softgpu/mutate/cases.py.
"""

import argparse
import datetime
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "softgpu"))
from mutate import build, report, run, self_test, sites  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\n")[0], description=__doc__)
    parser.add_argument("--sample", type=int, metavar="N", help="N sites that are neither fences nor explained")
    parser.add_argument("--seed", default="day", help="of the sample: a word, or the day")
    parser.add_argument("--only", default="", metavar="PATH", help="sites in files whose path contains this")
    parser.add_argument("--kind", help="sites of this kind")
    parser.add_argument("--configurations", metavar="NAMES", help="some of " + ",".join(run.CONFIGURATIONS) +
                        "; without it plain and reverse for a sample, all but asan else")
    parser.add_argument("--limit", type=float, metavar="MINUTES", help="begins no further mutant after that")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="mutants at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--patch", nargs="+", metavar="FILE")
    options = parser.parse_args()
    if options.self_test:
        return self_test.run()

    every = sites.all_sites(ROOT)
    chosen = [site for site in every if options.only in site.file and options.kind in (None, site.kind)]
    if options.list:
        for site in chosen:
            print(f"{site.key} {site.kind:8s} {site.file}:{site.line}: {site.says}")
        return 0
    log = report.Log(ROOT / "build" / "mutants" / "log.jsonl")
    if options.table:
        print(report.table(every, log))
        return 0
    usual = "plain,reverse" if options.sample else "plain,reverse,random,longer"
    configurations = (options.configurations or usual).split(",")
    if unknown := set(configurations) - set(run.CONFIGURATIONS):
        parser.error(f"--configurations: there is no {', '.join(sorted(unknown))}")
    if options.patch:
        return run.patches(ROOT, [Path(name).resolve() for name in options.patch], configurations)

    tree = "tree"
    if options.sample:
        seed = datetime.date.today().isoformat() if options.seed == "day" else options.seed
        chosen = sites.sample(chosen, options.sample, seed, set(report.explanations()))
        print(f"a sample of {len(chosen)} sites, --seed {seed}")
        every, tree = chosen, "sample"
    tree = build.mutated_tree(ROOT, ROOT / "build" / "mutants" / tree, every)
    found = run.mutants(ROOT, tree, chosen, configurations, log, options.limit, options.workers)
    print(report.summary(found))
    if not found:
        print("no mutant was run")
        return 2
    return 1 if report.unexplained(found) else 0


if __name__ == "__main__":
    sys.exit(main())
