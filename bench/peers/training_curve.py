#!/usr/bin/env python3
"""The same training with Hugging Face transformers and with sparsebalance: one initial checkpoint, the same sequences in the same
order, the same learning rates. Both loss curves, their difference and both speeds.

    bench/peers/training_curve.py --device cuda [--steps 600] [--out FOLDER]

A Qwen2 shape of 22.8M parameters learns this repository's own text files, byte by byte, 16 sequences of 1,024 bytes per step.
transformers has values in fp32, bf16 autocast and the fused AdamW; ours is as always: bf16 with fp32 values on a GPU, fp32 on a
CPU. Weight decay is for matrices alone and the gradient is clipped at 1 on both sides. --small: a tiny model for a CPU."""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench/quality"))
import svg_lines  # noqa: E402
import token_files  # noqa: E402
from runs import metrics  # noqa: E402

FULL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16}
BATCH, WARM_UP = 16, 10
OPTIMIZER = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}


def sequences(steps, length):
    """Pieces of the repository's text in a random, always equal order, as often as needed."""
    text = b"".join(path.read_bytes() for folder in ("src", "docs", "tests", "bench")
                    for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".cpp", ".h", ".cu", ".cuh", ".md", ".py"))
    pieces = [text[i:i + length] for i in range(0, len(text) - length + 1, length)]
    shuffled, order = [], random.Random(1)
    while len(shuffled) < steps * BATCH:
        order.shuffle(pieces)
        shuffled += pieces
    return shuffled[:steps * BATCH]


def write_data(folder, pieces):
    token_files.write(folder / "bytes", [b"".join(byte.to_bytes(2, "little") for byte in piece) for piece in pieces])


class Ours:
    def __init__(self, arguments, folder, shape):
        self.arguments, self.folder, self.shape = arguments, folder, shape

    def train(self, name, model, steps, rate):
        config = {"device": self.arguments.device, "model": model,
                  "data": {"train": [str(self.folder / "bytes")], "shuffle": False,
                           "max_sequence_length": self.arguments.length},
                  "batch": {"global_batch_size": BATCH, "micro_batch_tokens": BATCH * self.arguments.length},
                  "optimizer": dict(OPTIMIZER, learning_rate=rate, schedule="constant", warmup_steps=WARM_UP),
                  "train": {"max_steps": steps, "save_steps": 0, "log_steps": 100, "tensorboard": False, "seed": 1,
                            "recompute": "none", "output_dir": str(self.folder / name)}}
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
        done = subprocess.run([str(self.arguments.program), "train", str(file)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"sparsebalance train {file} failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return self.folder / name

    def initial(self):
        """A checkpoint of random values: a step at a learning rate of 0 leaves them as they are."""
        init = {"init": dict(self.shape, model_type="qwen2", vocab_size=256, tie_word_embeddings=True)}
        return self.train("initial", init, 1, 0.0) / "final"

    def curve(self, start, steps):
        rows = [row for row in metrics(self.train("ours", {"path": str(start)}, steps, 1e-3)) if "loss" in row]
        late = rows[len(rows) // 2:]
        return {"losses": [row["loss"] for row in rows], "rates": [row["learning_rate"] for row in rows],
                "tokens_per_second": statistics.median(row["tokens_per_second"] for row in late)}


def theirs(arguments, start, pieces, rates):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()  # it would share a line with the result
    device = arguments.device
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="sdpa").to(device).train()
    matrices = [value for value in model.parameters() if value.dim() >= 2]
    vectors = [value for value in model.parameters() if value.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
                                   {"params": vectors, "weight_decay": 0.0}], lr=1.0, betas=tuple(OPTIMIZER["betas"]),
                                  eps=OPTIMIZER["eps"], fused=True)
    losses, times = [], []
    for step, rate in enumerate(rates):
        begin = time.perf_counter()
        batch = pieces[step * BATCH:(step + 1) * BATCH]
        ids = torch.tensor([list(piece) for piece in batch], device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - begin)
    return {"losses": losses, "tokens_per_second": BATCH * arguments.length / statistics.median(times[len(times) // 2:])}


def compare(ours, peer):
    """What gpu-check-table.py judges."""
    gaps = [one - two for one, two in zip(ours["losses"], peer["losses"])]
    last = gaps[-len(gaps) // 3:]
    return {"curve": len(gaps), "first": ours["losses"][0], "last": statistics.mean(ours["losses"][-20:]),
            "peer_last": statistics.mean(peer["losses"][-20:]), "first_50": statistics.mean(map(abs, gaps[:50])),
            "mean": statistics.mean(map(abs, gaps)), "drift": statistics.mean(last),
            "ours_tok_s": round(ours["tokens_per_second"]), "peer_tok_s": round(peer["tokens_per_second"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, help="default: that of the device's build")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs/training-curve")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    arguments.program = arguments.program or ROOT / f"build/{arguments.device}/src/cli/sparsebalance"
    folder = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    pieces = sequences(arguments.steps, arguments.length)
    write_data(folder, pieces)
    program = Ours(arguments, folder, SMALL if arguments.small else FULL)
    start = program.initial()
    ours = program.curve(start, arguments.steps)
    peer = theirs(arguments, start, pieces, ours["rates"])
    result = compare(ours, peer)
    (arguments.out / "curve.json").write_text(json.dumps({"result": result, "ours": ours, "transformers": peer}) + "\n",
                                              encoding="utf-8")
    points = [(name, list(zip(range(10, arguments.steps + 1), svg_lines.smoothed(run["losses"], 10))))
              for name, run in (("transformers", peer), ("sparsebalance", ours))]
    (arguments.out / "curve.svg").write_text(
        svg_lines.chart("The same training by transformers and by sparsebalance", "step (means of 10)", "nats per byte", points),
        encoding="utf-8")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
