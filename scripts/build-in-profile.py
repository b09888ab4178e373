#!/usr/bin/env python3
"""Puts measured profiles into the program: checks what `sparsebalance profile --out FILE` wrote and copies it to
src/plan/latency/measured/MACHINE-MODEL.json (MACHINE-MODEL-loraRANK.json of adapters), from where the next build takes
it.
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
        if "score" not in profile.get("attention", {}):
            refuse(path, "does not say how pairs were chosen as it was measured")
        if "us_per_prefix" not in profile["operations"]["attention_backward"]:
            refuse(path, "does not say what the prefix of a piece costs")
        profile["name"] = machine
        rank = profile.get("lora_rank", 0)
        to = there / f"{machine}-{profile['model']['name']}{f'-lora{rank}' if rank else ''}.json"
        to.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
        print(f"{to}: {profile['machine']}, {profile['date']}, median {error['median']:.3f}, p95 {error['p95']:.3f}")


if __name__ == "__main__":
    main()
