#!/usr/bin/env python3
"""LoRA adapters against PEFT, in fp32 on the CPU, for small models of every family: the loss, logits, the adapters' gradients and
ten AdamW steps from an adapter that PEFT wrote; our adapter in PeftModel.from_pretrained; our merge against merge_and_unload; an
adapter with trained norms and embedding.

check_peft.py PROGRAM. Exit code 77 (skipped) where peft, transformers or torch is missing.
"""
import array
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
    from transformers.utils import logging
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

LENGTH, SEQUENCES, VOCABULARY, STEPS = 64, 20, 512, 10
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1)
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# name: configuration of the model, targets, rslora
CASES = {
    "qwen2": (Qwen2Config(**SIZES, tie_word_embeddings=True), ALL_LINEAR, False),
    "qwen3": (Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False), ["q_proj", "v_proj", "down_proj"], True),
    "llama": (LlamaConfig(**SIZES, tie_word_embeddings=False), ALL_LINEAR, False),
}
LEARNING_RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def train(program, folder, name, model, data, lora, steps):
    file = folder / f"{name}.yaml"
    file.write_text(
        f"model: {{path: {model}}}\n"
        f"data: {{train: [{data}], max_sequence_length: {LENGTH}, shuffle: false}}\n"
        "batch: {global_batch_size: 2}\n"
        f"lora: {lora}\n"
        f"optimizer: {{learning_rate: {LEARNING_RATE}, betas: [{BETAS[0]}, {BETAS[1]}], eps: {EPS}, weight_decay: {DECAY}, "
        "max_grad_norm: 0, schedule: constant}\n"
        f"train: {{max_steps: {steps}, save_steps: 1, save_total_limit: 0, threads: 1, tensorboard: false, "
        f"output_dir: {folder / name}}}\n")
    run(program, "train", file)
    return folder / name


def our_loss(program, model, data, folder, adapter=None):
    result = folder / "ppl.json"
    run(program, "eval", "ppl", "--model", model, "--data", data, "--max-tokens", LENGTH, "--threads", 1, "--json", result,
        *(["--adapter", adapter] if adapter else []))
    return next(row["loss"] for row in json.loads(result.read_text())["rows"] if row["positions"] == "all")


def base_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def their_loss(model, sequences):
    model.eval()
    with torch.no_grad():
        return sum(model(input_ids=ids, labels=ids).loss.item() for ids in sequences) / len(sequences)


def compare_logits(program, folder, name, model, base, adapter, sequence, report):
    """Log-probabilities after one prefix: `eval ppl` over a file whose only target is its last token."""
    tokens = sequence[0].tolist()
    data = folder / "one-target"
    run(program, "data", "synth", "--task", "copy", "--length", LENGTH, "--sequences", 1, "--vocab-size", VOCABULARY,
        "--output", data, "--overwrite")
    bitmap = bytes(LENGTH // 8 - 1) + b"\x80"
    (folder / "one-target.mask").write_bytes(
        b"SBLABELS" + struct.pack("<QQQiiqq", 1, 1, LENGTH, 1, 0, 0, len(bitmap)) + bitmap)
    model.eval()
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=sequence).logits[0, -2], dim=-1)
    worst = 0.0
    for token in range(0, VOCABULARY, VOCABULARY // 16):
        (folder / "one-target.bin").write_bytes(array.array("H", [*tokens[:-1], token]).tobytes())
        ours = -our_loss(program, base, data, folder, adapter)
        worst = max(worst, abs(ours - theirs[token].item()))
    report(f"{name}: log-probabilities of 16 tokens", worst, 1e-5)


def batch_loss(model, sequences, step):
    pair = [sequences[(2 * step + i) % len(sequences)] for i in range(2)]
    return sum(model(input_ids=ids, labels=ids).loss for ids in pair) / 2


def difference(ours, theirs):
    """The largest relative difference of any tensor."""
    if set(ours) != set(theirs):
        sys.exit(f"other tensors: {sorted(set(ours) ^ set(theirs))[:4]}")
    return max((torch.linalg.norm(ours[n] - theirs[n]) / torch.linalg.norm(theirs[n])).item() for n in ours)


def trained(model):
    """What PEFT trains, under the names it saves."""
    return {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}


def make_cases(folder, name):
    config, targets, rslora = CASES[name]
    torch.manual_seed(1)
    base = folder / f"{name}-base"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").save_pretrained(base)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets, use_rslora=rslora,
                      init_lora_weights=False, task_type="CAUSAL_LM")  # False: B is random, too
    model = get_peft_model(base_model(base), lora)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.mul_(0.1)
    model.save_pretrained(folder / f"{name}-theirs")
    listed = "all-linear" if len(targets) == 7 else "[" + ", ".join(targets) + "]"
    text = f"{{rank: 4, alpha: 8, targets: {listed}, rslora: {str(rslora).lower()}, merged: true"
    return base, model, text


def compare_training(program, folder, name, data, sequences, report):
    base, model, lora = make_cases(folder, name)
    theirs = folder / f"{name}-theirs"
    report(f"{name}: loss with PEFT's adapter", abs(our_loss(program, base, data, folder, theirs) -
                                                    their_loss(model, sequences)), 1e-5)
    compare_logits(program, folder, name, model, base, theirs, sequences[0], report)
    ours = train(program, folder, f"{name}-run", base, data, lora + f", adapter: {theirs}}}", STEPS)
    model.train()
    optimizer = torch.optim.AdamW(trained(model).values(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = batch_loss(model, sequences, step)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            # Without clipping the first moment is (1 - beta1) times the gradient.
            moments = load_file(ours / "checkpoint-1" / "optimizer.safetensors")
            gradients = {n: moments["exp_avg." + n] / (1 - BETAS[0]) for n in trained(model)}
            report(f"{name}: gradients", difference(gradients, {n: p.grad for n, p in trained(model).items()}), 1e-5)
        optimizer.step()
    lines = [json.loads(line) for line in (ours / "metrics.jsonl").read_text().splitlines()]
    steps = [line["loss"] for line in lines if "loss" in line]
    report(f"{name}: losses of {STEPS} steps", max(abs(a - b) for a, b in zip(steps, losses, strict=True)), 1e-4)
    final = load_file(ours / "final" / "adapter_model.safetensors")
    report(f"{name}: adapter after {STEPS} steps", difference(final, {n: p.detach() for n, p in trained(model).items()}), 1e-4)
    return base, ours


def compare_files(program, folder, name, data, sequences, base, ours, report):
    loaded = PeftModel.from_pretrained(base_model(base), ours / "final")
    loss = our_loss(program, base, data, folder, ours / "final")
    report(f"{name}: our adapter in PEFT", abs(loss - their_loss(loaded, sequences)), 1e-5)
    merged = folder / f"{name}-merged"
    run(program, "merge", base, ours / "final", merged)
    unloaded = loaded.merge_and_unload().state_dict()
    mine = load_file(merged / "model.safetensors")
    report(f"{name}: merge and merge_and_unload", difference(mine, {n: unloaded[n] for n in mine}), 1e-6)
    report(f"{name}: merged/ of the run", difference(mine, load_file(ours / "merged" / "model.safetensors")), 1e-7)
    report(f"{name}: loss of the merged model", abs(our_loss(program, merged, data, folder) - loss), 1e-5)


def compare_trained_parts(program, folder, name, data, sequences, base, report):
    ours = train(program, folder, f"{name}-parts", base, data, "{rank: 2, alpha: 4, train: [norms, embedding]}", 3)
    loaded = PeftModel.from_pretrained(base_model(base), ours / "final")
    loss = our_loss(program, base, data, folder, ours / "final")
    report(f"{name}: norms and embedding in PEFT", abs(loss - their_loss(loaded, sequences)), 1e-5)
    report(f"{name}: norms and embedding, merged", abs(our_loss(program, ours / "merged", data, folder) - loss), 1e-5)
    plain = their_loss(base_model(base), sequences)
    report(f"{name}: they changed the model", 0.0 if abs(plain - loss) > 1e-4 else 1.0, 0.5)


def main(program):
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    failures = []

    def report(what, got, most):
        ok = got <= most
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {got:.2e} (at most {most:.0e})", flush=True)
        if not ok:
            failures.append(what)

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        data = folder / "tokens"
        run(program, "data", "synth", "--task", "copy", "--length", LENGTH, "--sequences", SEQUENCES, "--vocab-size",
            VOCABULARY, "--output", data)
        (folder / "tokens.mask").unlink()  # every token counts
        tokens = array.array("H", (folder / "tokens.bin").read_bytes())
        sequences = [torch.tensor([list(tokens[i * LENGTH:(i + 1) * LENGTH])]) for i in range(SEQUENCES)]
        for name in CASES:
            base, ours = compare_training(program, folder, name, data, sequences, report)
            compare_files(program, folder, name, data, sequences, base, ours, report)
            compare_trained_parts(program, folder, name, data, sequences, base, report)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
