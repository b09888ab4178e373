#!/usr/bin/env python3
"""Models go to Hugging Face transformers and come back unchanged: small ones of every family and rope type are trained by the
program, loaded by transformers, saved by it in shards and read again, and every time the loss of the same tokens is the same.

check_transformers.py PROGRAM. Exit code 77 (skipped) where transformers or torch is missing.
"""
import array
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

LENGTH, SEQUENCES, VOCABULARY = 256, 4, 512
TOLERANCE = 2e-5  # fp32 on both sides; losses are near 6

# name: what model.init, model.rope and model.save_dtype add
CASES = {
    "qwen2": ("model_type: qwen2, tie_word_embeddings: true", "", "float32"),
    "qwen2-yarn": ("model_type: qwen2, tie_word_embeddings: true, max_position_embeddings: 128",
                   "{type: yarn, factor: 4}", "float32"),
    "qwen3-bf16": ("model_type: qwen3, tie_word_embeddings: false, head_dim: 32", "", "bfloat16"),
    "llama-bias-llama3": ("model_type: llama, tie_word_embeddings: false, attention_bias: true",
                          "{type: llama3, factor: 8, original_max_position_embeddings: 64}", "float32"),
    "llama-linear": ("model_type: llama, tie_word_embeddings: true", "{type: linear, factor: 2}", "float32"),
}


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def train(program, folder, name, case, model=None):
    """From scratch as the case says, or on from `model` with a rope of its own; the folder of what was trained."""
    init, rope, dtype = CASES[case]
    if model is None:
        text = (f"model:\n  init: {{{init}, vocab_size: {VOCABULARY}, hidden_size: 64, intermediate_size: 96, "
                "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, initializer_range: 0.1}\n")
    else:
        text, rope = f"model:\n  path: {model}\n", "{type: yarn, factor: 16}"
    text += f"  save_dtype: {dtype}\n" + (f"  rope: {rope}\n" if rope else "")
    text += ("data: {max_sequence_length: 64, synthetic: {task: copy, length: 64, vocab_size: 512}}\n"
             "batch: {global_batch_size: 2}\n"
             "optimizer: {learning_rate: 1.0e-2, schedule: constant}\n"
             f"train: {{max_steps: 3, save_steps: 0, threads: 1, tensorboard: false, output_dir: {folder / name}}}\n")
    file = folder / f"{name}.yaml"
    file.write_text(text)
    run(program, "train", file)
    return folder / name / "final"


def our_loss(program, model, data, folder):
    result = folder / "ppl.json"
    run(program, "eval", "ppl", "--model", model, "--data", data, "--max-tokens", LENGTH, "--threads", 1, "--json", result)
    return next(row["loss"] for row in json.loads(result.read_text())["rows"] if row["positions"] == "all")


def their_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def their_loss(model, sequences):
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for ids in (torch.tensor([s]) for s in sequences)]
    return sum(losses) / len(losses)  # all have the same length


def main(program):
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        data = folder / "tokens"
        run(program, "data", "synth", "--task", "copy", "--length", LENGTH, "--sequences", SEQUENCES, "--vocab-size",
            VOCABULARY, "--output", data)
        (folder / "tokens.mask").unlink()  # every token counts
        tokens = array.array("H", (folder / "tokens.bin").read_bytes())
        sequences = [list(tokens[i * LENGTH:(i + 1) * LENGTH]) for i in range(SEQUENCES)]
        for case in CASES:
            final = train(program, folder, case, case)
            model = their_model(final)
            shards = folder / f"{case}-shards"
            model.save_pretrained(shards, max_shard_size="60KB")
            pieces = len(list(shards.glob("model-*.safetensors")))
            # What transformers wrote has its present spelling of config.json; go on from it with another scaling.
            further = train(program, folder, f"{case}-further", case, shards)
            for what, losses in {
                    f"{case}, {pieces} shards": [our_loss(program, final, data, folder), their_loss(model, sequences),
                                                 our_loss(program, shards, data, folder)],
                    f"{case}, further": [our_loss(program, further, data, folder),
                                         their_loss(their_model(further), sequences)]}.items():
                ok = max(losses) - min(losses) <= TOLERANCE and pieces > 1
                failures += not ok
                print(f"{'ok  ' if ok else 'FAIL'} {what}: " + ", ".join(f"{loss:.6f}" for loss in losses), flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
