"""What the studies of this folder share: commands with their output in a file, and what a run measured."""

import json
import subprocess
import sys


def run(command, log):
    """Adds a command's output to a file; shows the end of it when the command fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as out:
        code = subprocess.run([str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))}\nfailed, {log}:\n" + log.read_text(encoding="utf-8")[-2000:])


def metrics(directory):
    with open(directory / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
