#!/usr/bin/env python3
"""Puts measured profiles into the program: checks what `sparsebalance profile --out FILE` wrote and copies it to
src/plan/latency/measured/MACHINE-MODEL.json, from where the next build takes it.
  scripts/build-in-profile.py MACHINE FILE...        MACHINE: what users will ask for, such as h200"""

import json
import pathlib
import sys

MEDIAN, P95, LEAST = 0.03, 0.08, 30  # errors on held-out micro-batches, and how many it takes to state them


def refuse(path, why):
    sys.exit(f"{path}: {why}; measure again")


def main():
    if len(sys.argv) < 3 or "-" in sys.argv[1]:
        sys.exit(__doc__)
    machine = sys.argv[1]
    there = pathlib.Path(__file__).resolve().parent.parent / "src" / "plan" / "latency" / "measured"
    for path in sys.argv[2:]:
        profile = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if profile.get("format") != "sparsebalance-profile":
            refuse(path, "is not a profile")
        error = profile["held_out_error"]
        if error["count"] < LEAST:
            refuse(path, f"checked on {error['count']} micro-batches only, of at least {LEAST} (--held-out)")
        if error["median"] > MEDIAN or error["p95"] > P95:
            refuse(path, f"median error {error['median']:.3f}, p95 {error['p95']:.3f}, more than {MEDIAN} and {P95}")
        if "attention" not in profile:
            refuse(path, "does not say with which blocks it was measured")
        profile["name"] = machine
        to = there / f"{machine}-{profile['model']['name']}.json"
        to.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
        print(f"{to}: {profile['machine']}, {profile['date']}, median {error['median']:.3f}, p95 {error['p95']:.3f}")


if __name__ == "__main__":
    main()
