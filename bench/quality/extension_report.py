#!/usr/bin/env python3
"""Tables and pictures from what extension.py measured.

    bench/quality/extension_report.py results.json [more.json ...] --out docs/results

Prints markdown and writes extension-*.svg. Differences are taken between runs of one base and one seed, which saw the same data
in the same order; several seeds give a mean and its standard error."""

import argparse
import json
import pathlib
import statistics
import sys

import svg_lines

NAMES = {"dense": "dense, in order", "fixed": "fixed budget, our router, in order", "optimal": "**SparseBalance, `optimal`**",
         "pieces": "SparseBalance, `optimal`, in pieces", "anchor": "SparseBalance, `anchor: mean`, p = 0.1 (the paper's)",
         "published": "fixed budget, look-ahead block means (the published router), in order"}
BOUND = 0.003  # nats that `optimal` may lose against the fixed budget, or two standard errors if that is less


def load(files):
    runs = {}
    for file in files:
        results = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        runs.update(results["runs"])
    return list(runs.values())


def select(runs, **wanted):
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def as_trained(run, kind):
    """The loss with the attention that the run was trained with."""
    return run.get(f"{kind} dense" if run["method"] == "dense" else f"{kind} as trained")


def dense(run, kind):
    return run.get(f"{kind} dense")


def differences(runs, others, value):
    """value(run) - value(other) wherever both are of one base and seed."""
    found = []
    for run in runs:
        for other in others:
            if (run["base"], run["seed"]) == (other["base"], other["seed"]):
                one, two = value(run), value(other)
                if one is not None and two is not None:
                    found.append(one - two)
    return found


def standard_error(values):
    return statistics.stdev(values) / len(values) ** 0.5


def spread(values, digits=4, scale=1.0):
    """Mean and standard error."""
    if not values:
        return "–"
    mean = f"{scale * statistics.mean(values):+.{digits}f}".replace("-", "−")
    return mean if len(values) == 1 else f"{mean} ± {scale * standard_error(values):.{digits}f}"


def mean_of(runs, key, scale=1.0, digits=1, unit=""):
    values = [run[key] for run in runs if run.get(key) is not None]
    return f"{scale * statistics.mean(values):.{digits}f}{unit}" if values else "–"


def cluster_seconds(run):
    return sum(run["cluster_step_ms"]) / 1e3


def ratios(runs, others):
    """How many times as fast as others of the same base and seed the cluster would be."""
    return [cluster_seconds(other) / cluster_seconds(run) for run in runs for other in others
            if (run["base"], run["seed"]) == (other["base"], other["seed"])]


def times(values):
    return f"{statistics.mean(values):.2f}" if values else "–"


def settings(runs):
    """(length, share) of the sparse runs, the larger share and the shorter length first."""
    found = {(run["length"], run["share"]) for run in runs if run["method"] != "dense"}
    return sorted(found, key=lambda one: (one[0], -one[1]))


def copied_right(run):
    return run.get("copied dense accuracy" if run["method"] == "dense" else "copied as trained accuracy")


def main_table(runs, length):
    """All ways at one length: what was computed, what was learned, how long it takes."""
    base = select(runs, length=length, method="dense")
    lines = [f"### Up to {length:,} tokens", "",
             "| extended with | seeds | pairs | coverage | held-out loss minus dense | minus fixed | evaluated dense, minus dense "
             "| copied passages, % right | tokens/s on one GPU | predicted time on 16 GPUs | as fast as fixed | as fast as dense |",
             "| --- |" + " ---: |" * 11]
    for share in [None, *[own for at, own in settings(runs) if at == length]]:
        fixed = select(runs, length=length, share=share, method="fixed")
        for method, name in NAMES.items():
            own = select(runs, length=length, method=method) if share is None else select(runs, length=length, share=share, method=method)
            if not own or (method == "dense") != (share is None):
                continue
            loss, copies = (lambda run: as_trained(run, "held-out")), mean_of([{"right": copied_right(run)} for run in own], "right", 100)
            cells = [name + ("" if share is None else f", {100 * share:.0f} %"), str(len(own)),
                     "100 %" if share is None else mean_of(own, "density", 100, unit=" %"),
                     "100 %" if share is None else mean_of(own, "coverage", 100, unit=" %"),
                     f"({statistics.mean(map(loss, own)):.4f})" if share is None else spread(differences(own, base, loss)),
                     "" if method in ("dense", "fixed") else spread(differences(own, fixed, loss)),
                     "" if share is None else spread(differences(own, base, lambda run: dense(run, "held-out"))), copies,
                     mean_of(own, "tokens_per_second", 1e-3, 0, "k"), f"{statistics.mean(map(cluster_seconds, own)):.2f} s",
                     "" if method == "fixed" else times(ratios(own, fixed)), "" if share is None else times(ratios(own, base))]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def verdict(values):
    """Whether a loss is within what may be lost; a standard error needs two seeds."""
    if len(values) < 2:
        return "one seed"
    most = min(BOUND, 2 * standard_error(values))
    return f"{'within' if statistics.mean(values) <= most else 'NOT within'} {most:.4f}"


def paired_table(runs):
    lines = ["### SparseBalance against the fixed budget, paired by base and seed", "",
             "| length, pairs | held-out loss | by seed | verdict | at 4/5 of the budget | evaluated dense | copied passages, points | first positions | last positions |",
             "| --- |" + " ---: |" * 8]

    def at(place):
        def value(run):
            rows = list(run.get("held-out as trained by position", {}).values())
            return rows[place] if rows else None
        return value
    for length, share in settings(runs):
        fixed = select(runs, length=length, share=share, method="fixed")
        for method in ("optimal", "anchor", "pieces", "published"):
            own = select(runs, length=length, share=share, method=method)
            found = differences(own, fixed, lambda run: as_trained(run, "held-out"))
            if not found:
                continue
            cells = [spread(found), ", ".join(spread([one]) for one in found), verdict(found),
                     spread(differences(own, fixed, lambda run: run.get("held-out reduced"))),
                     spread(differences(own, fixed, lambda run: dense(run, "held-out"))),
                     spread(differences(own, fixed, copied_right), 2, 100), spread(differences(own, fixed, at(0))),
                     spread(differences(own, fixed, at(-1)))]
            lines.append(f"| {length:,}, {100 * share:.0f} %: `{method}` − fixed | " + " | ".join(cells) + " |")
    return lines


def position_table(runs, length, share):
    base = select(runs, length=length, method="dense")
    positions = list(base[0].get("held-out dense by position", {})) if base else []
    if not positions:
        return []
    lines = [f"### Held-out loss by position, minus dense, {length:,} tokens, {100 * share:.0f} % of the pairs", "",
             "| trained with | " + " | ".join(positions) + " |", "| --- |" + " ---: |" * len(positions)]
    for method, name in NAMES.items():
        own = select(runs, length=length, share=share, method=method)
        if method == "dense" or not own:
            continue
        cells = []
        for position in positions:
            def value(run, position=position):
                way = "held-out dense" if run["method"] == "dense" else "held-out as trained"
                return run.get(way + " by position", {}).get(position)
            found = differences(own, base, value)
            cells.append(spread([statistics.mean(found)] if found else []))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def task_table(runs):
    with_tasks = [run for run in runs if run.get("tasks")]
    tasks = sorted({task for run in with_tasks for task in run["tasks"]})
    if not tasks:
        return []
    lines = ["### After the same short fine-tuning, % of the answers' tokens that are right", "",
             "| extended with | " + " | ".join(tasks) + " |", "| --- |" + " ---: |" * len(tasks)]
    for method, name in NAMES.items():
        own = [run for run in with_tasks if run["method"] == method]
        if own:
            lines.append(f"| {name} | " + " | ".join(
                mean_of([run["tasks"][task] for run in own if task in run["tasks"]], "accuracy", 100) for task in tasks) + " |")
    return lines


def pictures(runs, length, share, folder):
    """Loss minus dense over steps, loss over the time here and on the cluster, of the first seed that has most methods."""
    seeds = sorted({(run["base"], run["seed"]) for run in select(runs, length=length)},
                   key=lambda key: (-len(select(runs, length=length, base=key[0], seed=key[1])), key[1]))
    if not seeds:
        return []
    base, seed = seeds[0]
    own = {run["method"]: run for run in select(runs, length=length, base=base, seed=seed)
           if run["method"] == "dense" or run["share"] == share}
    width = max(1, min(16, len(next(iter(own.values()))["losses"]) // 4))

    def over(values, losses):
        return list(zip(values[width - 1:], svg_lines.smoothed(losses, width)))

    def running(values):
        total, sums = 0.0, []
        for value in values:
            total += value / 1e3
            sums.append(total)
        return sums
    lines = {"steps": [], "gpu": [], "cluster": []}
    for method in NAMES:
        if method not in own:
            continue
        run = own[method]
        if "dense" in own and method != "dense":
            gaps = [one - two for one, two in zip(run["losses"], own["dense"]["losses"])]
            lines["steps"].append((method, over(range(1, len(gaps) + 1), gaps)))
        if run.get("tokens_per_second"):
            here = [1e3 * tokens / run["tokens_per_second"] for tokens in run["step_tokens"]]
            lines["gpu"].append((method, over(running(here), run["losses"])))
        lines["cluster"].append((method, over(running(run["cluster_step_ms"]), run["losses"])))
    what = f"up to {length:,} tokens, {100 * share:.0f} % of the pairs, seed {seed}, means of {width} steps"
    titles = {"steps": ("Training loss minus that of dense on the same batches", "step", "nats per token"),
              "gpu": ("Training loss over time on one GPU", "seconds", "nats per token"),
              "cluster": ("Training loss over predicted time on 16 GPUs (dp 4 × pp 4)", "seconds, predicted", "nats per token")}
    written = []
    for key, (title, x, y) in titles.items():
        if lines[key]:
            name = f"extension-{key}.svg"
            (folder / name).write_text(svg_lines.chart(title, f"{x} ({what})", y, lines[key]), encoding="utf-8")
            written.append(f"![{title}]({name})")
    return written


def report(runs, folder):
    finished = [run for run in runs if as_trained(run, "held-out") is not None and as_trained(run, "copied") is not None]
    text = []
    for length in sorted({run["length"] for run in finished}):
        text += [*main_table(finished, length), ""]
    text += [*paired_table(finished), ""]
    for length, share in settings(finished):
        text += [*position_table(finished, length, share), ""]
    text += [*task_table(finished), ""]
    if settings(finished):
        text += pictures(finished, *settings(finished)[0], folder)
    return "\n".join(text).rstrip() + "\n"


def self_test():
    import tempfile

    def run(method, seed, loss, base="b", share=0.25):
        kinds = {f"{kind} {way}": loss for kind in ("held-out", "copied") for way in ("dense", "as trained")}
        return {"method": method, "length": 1024, "share": share, "seed": seed, "base": base, "density": 0.25, "coverage": 0.9,
                "tokens_per_second": 1000.0, "cluster_step_ms": [100.0 if method == "fixed" else 50.0] * 4,
                "step_tokens": [10] * 4, "losses": [loss] * 4, "copied as trained accuracy": 0.5 + seed / 100, **kinds}
    runs = [run("dense", 1, 2.0), run("fixed", 1, 2.1), run("optimal", 1, 2.2), run("dense", 2, 3.0), run("fixed", 2, 3.2),
            run("optimal", 2, 3.5), run("optimal", 1, 9.0, base="another")]
    assert differences(select(runs, method="optimal"), select(runs, method="fixed"), lambda one: one["losses"][0]) == [
        2.2 - 2.1, 3.5 - 3.2], "within a base and seed alone"
    assert spread([0.1, 0.3]) == "+0.2000 ± 0.1000" and spread([-0.25]) == "−0.2500" and spread([]) == "–"
    assert verdict([0.001, 0.002]) == "NOT within 0.0010" and verdict([0.0, 0.001]) == "within 0.0010"
    assert verdict([0.004, -0.003]) == "within 0.0030" and verdict([0.001]) == "one seed"
    with tempfile.TemporaryDirectory() as folder:
        text = report(runs, pathlib.Path(folder))
        assert "| 1,024, 25 %: `optimal` − fixed | +0.2000 ± 0.1000 | +0.1000, +0.3000 | NOT within 0.0030 |" in text, text
        assert "| dense, in order | 2 | 100 % | 100 % | (2.5000) |" in text and "| 0.20 s | 2.00 | 1.00 |" in text, text
        picture = (pathlib.Path(folder) / "extension-cluster.svg").read_text(encoding="utf-8")
        assert picture.count("<polyline") == 3 and "dp 4" in picture
    assert svg_lines.ticks(0, 10) == [0, 2, 4, 6, 8, 10] and svg_lines.ticks(-0.011, 0.032) == [-0.01, 0, 0.01, 0.02, 0.03]
    assert svg_lines.smoothed([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]
    print("self-test: passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the pictures")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if not arguments.results:
        parser.error("which results.json?")
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(report(load(arguments.results), arguments.out), end="")


if __name__ == "__main__":
    sys.exit(main())
