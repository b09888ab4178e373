#!/usr/bin/env python3
"""One rank with one thread against two processes with one thread each that share its products (parallel.tp 2): steps of
a 25M-parameter Qwen2 shape over one sequence of 4,096 tokens, both ways by turns. The ratio stands at the end.

    bench/parallel/tensor_parallel.py build/cpu/src/cli/sparsebalance
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

RUN = """
model:
  init: {{model_type: qwen2, vocab_size: 8192, hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 8,
         num_attention_heads: 8, num_key_value_heads: 2, head_dim: 64, tie_word_embeddings: true,
         max_position_embeddings: 8192}}
data:
  max_sequence_length: {tokens}
  synthetic: {{task: chunk_recall, vocab_size: 8192, length: {tokens}, chunk: 4}}
batch: {{global_batch_size: 1}}
train: {{max_steps: {steps}, save_steps: 0, validation_sequences: 1, threads: 1, tensorboard: false, output_dir: {output}}}
"""


def step_ms(program, folder, ranks, tokens, steps):
    """The fastest step but the first, of a run on so many ranks, and the loss of the last."""
    output = pathlib.Path(folder) / f"tp{ranks}"
    file = pathlib.Path(folder) / f"tp{ranks}.yaml"
    file.write_text(RUN.format(tokens=tokens, steps=steps, output=output))
    command = [program, "train", str(file), "--set", f"parallel.tp={ranks}"]
    if ranks > 1:
        command += ["--ranks", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_ms" in line]
    return min(line["step_ms"] for line in steps[1:]), steps[-1]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    best = {}
    for _ in range(arguments.turns):
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                ms, loss = step_ms(arguments.program, folder, ranks, arguments.tokens, arguments.steps)
            print(f"tp {ranks}: {ms:8.1f} ms a step, loss {loss:.6f}", flush=True)
            best[ranks] = min(ms, best.get(ranks, ms))
    print(f"tp 2 with one thread a rank: {best[1] / best[2]:.2f} times as fast as one rank with one thread")


if __name__ == "__main__":
    main()
