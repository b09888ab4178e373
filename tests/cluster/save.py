#!/usr/bin/env python3
"""What saving a checkpoint takes on ranks whose disks are slow: bytes and seconds of every rank, and the most memory that
each of them had, for one rank and for 8 (data 2 x pipeline 2 x tensor 2). No process writes more than --rate a second.

  tests/cluster/save.py --program build/cpu/src/cli/sparsebalance
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

RUN = """
model:
  init: {model_type: qwen2, vocab_size: 16384, hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 8,
         num_attention_heads: 8, num_key_value_heads: 8, head_dim: 64}
data:
  synthetic: {task: chunk_recall, vocab_size: 16384, length: 64, chunk: 4}
batch: {global_batch_size: 8, micro_batch_sequences: 1}
train: {max_steps: 2, save_steps: 2, threads: 1, tensorboard: false, validation_sequences: 2}
"""
LAYOUTS = {1: {}, 8: {"dp": 2, "pp": 2, "tp": 2}}


def most_memory(process, run_file, found):
    """VmHWM of every rank of the run in MB, as long as it is there."""
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if str(run_file).encode() not in (entry / "cmdline").read_bytes():
                continue
            environment = (entry / "environ").read_bytes()
            rank = re.search(rb"OMPI_COMM_WORLD_RANK=(\d+)", environment)
            memory = re.search(r"VmHWM:\s+(\d+)", (entry / "status").read_text())
        except OSError:
            continue
        if memory and (rank or process.pid == int(entry.name)):
            number = int(rank[1]) if rank else 0
            found[number] = max(found.get(number, 0), int(memory[1]) / 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--rate", type=float, default=20e6, help="bytes a second that a process may write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sbsave.") as scratch:
        scratch = pathlib.Path(scratch)
        library = scratch / "slow_writes.so"
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, pathlib.Path(__file__).with_name("slow_writes.cpp"),
                        "-ldl"], check=True)
        (scratch / "run.yaml").write_text(RUN)
        for ranks, layout in LAYOUTS.items():
            settings = [f"train.output_dir={scratch}/run{ranks}", *[f"parallel.{name}={size}" for name, size in layout.items()]]
            words = [str(arguments.program), "--log-level", "debug", "train", str(scratch / "run.yaml"),
                     *[word for setting in settings for word in ("--set", setting)],
                     *(["--ranks", str(ranks)] if ranks > 1 else [])]
            environment = {**os.environ, "LD_PRELOAD": str(library), "SB_WRITE_RATE": str(arguments.rate),
                           "OPENBLAS_NUM_THREADS": "1"}
            log = scratch / f"log{ranks}"
            memory = {}
            with open(log, "wb") as out:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
                while process.poll() is None:
                    most_memory(process, scratch / "run.yaml", memory)
                    time.sleep(0.1)
            text = log.read_text(errors="replace")
            if process.returncode != 0:
                print(text[-3000:])
                return 1
            print(f"{ranks} rank{'s' if ranks > 1 else ''}")
            print("\n".join("  " + line for line in text.splitlines() if re.search(r"debug (wrote|saved)", line)))
            others = [memory[rank] for rank in sorted(memory) if rank > 0]
            if len(memory) != ranks:
                print(f"only {len(memory)} of {ranks} ranks were seen")
                return 1
            print(f"  most memory of rank 0: {memory[0]:.0f} MB"
                  + (f"; of the others: {min(others):.0f} to {max(others):.0f} MB; rank 0 / largest other "
                     f"{memory[0] / max(others):.2f}" if others else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
