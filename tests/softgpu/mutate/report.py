"""The log of all mutants, and what it says."""

import collections
import json
from pathlib import Path

# Survivors that were looked at, by the key of their site: why nothing can find them here.
EXPLAINED = Path(__file__).parent / "survivors.tsv"


class Log:
    def __init__(self, path: Path):
        self.path = path
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
        self.rows[row["key"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def explanations() -> dict[str, str]:
    if not EXPLAINED.exists():
        return {}
    rows = (line.split("\t") for line in EXPLAINED.read_text().splitlines() if line and not line.startswith("#"))
    return {row[0]: row[-1] for row in rows}


def unexplained(results) -> list:
    known = explanations()
    return [site for site, row in results if not row["found"] and site.kind != "fence" and site.key not in known]


def summary(results) -> str:
    by_kind = collections.defaultdict(collections.Counter)
    for site, row in results:
        by_kind[site.kind][row["found"] or ("survives" if row.get("reached", True) else "not reached")] += 1
    columns = sorted({name for counts in by_kind.values() for name in counts})
    lines = ["| kind | mutants | " + " | ".join(columns) + " |", "| --- |" + " --- |" * (len(columns) + 1)]
    for kind, counts in sorted(by_kind.items()):
        lines.append(f"| {kind} | {sum(counts.values())} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    rest = [(site, row) for site, row in results if site.kind != "fence" and site.key not in explanations()]
    if rest:
        found = sum(1 for _, row in rest if row["found"])
        lines.append(f"\n{found} of {len(rest)} that are neither fences nor explained are found ({found / len(rest):.0%})")
    return "\n".join(lines)


def table(numbered, log) -> str:
    results = [(site, row) for _, site in numbered if (row := log.get(site.key))]
    known = explanations()
    lines = [f"{len(results)} of {len(numbered)} mutants were run.", "", summary(results), "", "Survivors:", ""]
    for site, row in results:
        if not row["found"]:
            why = known.get(site.key, "NOT EXPLAINED" if site.kind != "fence" else "a fence: the device cannot see it")
            reached = "" if row.get("reached", True) else " (no test comes here)"
            lines.append(f"- `{site.key}` {site.file}:{site.line}: {site.says}{reached}: {why}")
    return "\n".join(lines)
