"""The log of all mutants, and what it says."""

import collections
import json
import threading
from pathlib import Path

# Survivors that were looked at, by the key of their site: why nothing finds them here.
EXPLAINED = Path(__file__).parent / "survivors.tsv"
# Of what is explained, that which no test on any device could find.
EQUIVALENT = "equivalent"
KINDS = ("wait", "arrive", "barrier", "event", "stream", "bound")
WAYS = {"results": ("results",), "the device's rules": ("rule", "deadlock"), "a sanitizer": ("sanitizer",), "time": ("time",)}


class Log:
    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()
        self.rows: dict[str, dict] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the last line of a run that was killed
                    continue
                self.rows[row["key"]] = row

    def get(self, key: str):
        return self.rows.get(key)

    def add(self, row: dict) -> None:
        with self.lock:
            self.rows[row["key"]] = row
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def explanations() -> dict[str, tuple[str, str]]:
    """Class and words of every explained survivor."""
    rows = (line.split("\t") for line in EXPLAINED.read_text().splitlines() if line and not line.startswith("#"))
    return {row[0]: (row[2], row[3]) for row in rows}


def unexplained(results) -> list:
    known = explanations()
    return [site for site, row in results if not row["found"] and site.kind != "fence" and site.key not in known]


def counts_of(results) -> collections.Counter:
    known = explanations()
    counts = collections.Counter(sites=len(results))
    for site, row in results:
        if row["found"]:
            counts[next(way for way, names in WAYS.items() if row["found"] in names)] += 1
        elif known.get(site.key, ("",))[0] == EQUIVALENT:
            counts["equivalent"] += 1
        else:
            counts["survived"] += 1
    return counts


def table_of(groups: dict[str, list], first: str) -> list[str]:
    columns = ["sites", *WAYS, "equivalent", "survived"]
    lines = [f"| {first} | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, results in groups.items():
        counts = counts_of(results)
        lines.append(f"| {name} | " + " | ".join(str(counts[c] or "") for c in columns) + " |")
    return lines


def share(results) -> str:
    counts = counts_of(results)
    counted = counts["sites"] - counts["equivalent"]
    found = counted - counts["survived"]
    return f"{found} of {counted} that are not equivalent are found ({100 * found / max(counted, 1):.1f} %)"


def summary(results) -> str:
    rest = [(site, row) for site, row in results if site.kind != "fence"]
    kinds = {kind: [r for r in rest if r[0].kind == kind] for kind in KINDS}
    lines = table_of({kind: those for kind, those in kinds.items() if those} | {"all": rest}, "kind")
    return "\n".join([*lines, "", share(rest)])


def by_file(results) -> list[str]:
    rest = [(site, row) for site, row in results if site.kind != "fence"]
    groups: dict[str, list] = {}
    for site, row in rest:
        groups.setdefault(site.file, []).append((site, row))
    lines = table_of({f"`{file}`": those for file, those in groups.items()}, "file")
    # The kinds of each, found and made: "wait 7 of 8".
    lines[0] += " found of each kind |"
    lines[1] += " --- |"
    for at, those in enumerate(groups.values(), 2):
        kinds = collections.Counter(site.kind for site, _ in those)
        found = collections.Counter(site.kind for site, row in those if row["found"])
        lines[at] += " " + ", ".join(f"{k} {found[k]}/{kinds[k]}" for k in KINDS if kinds[k]) + " |"
    return lines


def table(sites, log) -> str:
    results = [(site, row) for site in sites if (row := log.get(site.key))]
    known = explanations()
    lines = [f"{len(results)} of {len(sites)} mutants were run, {sum(r['cpu'] for _, r in results):.0f} s of processor time.",
             "", summary(results), "", *by_file(results), "", "Survivors:", ""]
    for site, row in results:
        if not row["found"] and site.kind != "fence":
            kind, why = known.get(site.key, ("NOT EXPLAINED", ""))
            reached = "" if row["reached"] else " (no case comes here)"
            lines.append(f"- `{site.key}` {site.file}:{site.line}: {site.says}{reached}: {kind}. {why}")
    fences = [(site, row) for site, row in results if site.kind == "fence"]
    lines += ["", f"Fences: {len(fences)}, of which {sum(bool(row['found']) for _, row in fences)} found."]
    return "\n".join(lines)
