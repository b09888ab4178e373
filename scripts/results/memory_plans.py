"""Memory plans that `train` prints before its first step. Twenty runs far larger than the address space that they are
given, so that every one ends with its plan, in a moment and on any machine."""

import json
import re

from results.case import Case, flat, refusal, run
from results.settings import ADAPTERS, BASE, attention, layout, nested, ranks_of

ADDRESS_SPACE = 4 << 30

QWEN_3B = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
LLAMA_8B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "tie_word_embeddings": False, "rope_theta": 500000}


def model(shape):
    return {f"model.init.{name}": value for name, value in {"max_position_embeddings": 1 << 20, **shape}.items()}


def tokens(count, sequences=1):
    return {"data.max_sequence_length": count, "data.synthetic.length": count, "data.synthetic.min_length": 0,
            "batch.micro_batch_sequences": sequences, "batch.micro_batch_tokens": count * sequences,
            "train.loss_chunk": 1024, "train.layer_chunk": 32768}


def blocks(pattern, **more):
    sizes = {"block": 128, "query_block": 16, "budget": 8192, "local_blocks": 2, "score_channels": 32}
    return attention(pattern, **{**sizes, **more})


SLASHES = blocks("vertical_slash", selection="lookahead", query_block=128, vertical_cap=4096, slash_cap=256)
BALANCE = {"balance.batching": "sab", "balance.ordering": "auto", "balance.tuning": "optimal",
           "balance.profile": "h200", "balance.max_budget": 16384}
BIG, BIGGER = model(QWEN_3B), model(LLAMA_8B)
CONFIGURATIONS = {
    "3b-32k-dense": {**BIG, **tokens(32768), **blocks("dense")},
    "3b-32k-dense-recompute-none": {**BIG, **tokens(32768), **blocks("dense"), "train.recompute": "none"},
    "3b-32k-mass-planes": {**BIG, **tokens(32768), **blocks("mass")},
    "3b-32k-mass-moments-recompute-layer": {**BIG, **tokens(32768), **blocks("mass", score="moments"),
                                            "train.recompute": "layer"},
    "3b-32k-mass-lookahead": {**BIG, **tokens(32768), **blocks("mass", selection="lookahead")},
    "3b-128k-topk-planes": {**BIG, **tokens(131072), **blocks("topk")},
    "3b-128k-topk-exact": {**BIG, **tokens(131072), **blocks("topk", score="moments", score_tokens=1)},
    "3b-128k-block-mean": {**BIG, **tokens(131072),
                           **blocks("topk", selection="lookahead", score="mean", query_block=128)},
    "3b-128k-window": {**BIG, **tokens(131072), **blocks("window")},
    "3b-512k-vertical_slash": {**BIG, **tokens(524288), **SLASHES},
    "3b-512k-vertical_slash-cp8": {**BIG, **tokens(524288), **SLASHES, **layout(cp=8)},
    "3b-128k-mass-cp4-machines-of-2": {**BIG, **tokens(131072), **blocks("mass"), **layout(cp=4),
                                       "parallel.node_size": 2},
    "3b-32k-mass-dp2-pp2-tp2": {**BIG, **tokens(32768), **blocks("mass"), **layout(dp=2, pp=2, tp=2)},
    "3b-128k-mass-pp2-cp2": {**BIG, **tokens(131072), **blocks("mass"), **layout(pp=2, cp=2)},
    "3b-64k-balanced-dp2-pp2": {**BIG, **tokens(65536), **blocks("mass"), **BALANCE, **layout(dp=2, pp=2)},
    "3b-128k-pieces-16k": {**BIG, **tokens(131072), **blocks("mass"), "balance.chunk": 16384,
                           "train.recompute": "chunk"},
    "3b-128k-pieces-16k-pp2-cp2": {**BIG, **tokens(131072), **blocks("topk"), "balance.chunk": 16384,
                                   **layout(pp=2, cp=2)},
    "3b-128k-adapters": {**BIG, **tokens(131072), **blocks("mass"), **ADAPTERS, "lora.rank": 32},
    "8b-32k-mass-bfloat16-moments": {**BIGGER, **tokens(32768, 2), **blocks("mass"), "optimizer.moments": "bfloat16"},
    "8b-128k-topp-block-256": {**BIGGER, **tokens(131072), **blocks("topp", block=256, query_block=32)},
}


def printed_plans(text):
    """{"stage 0": {"scratch": "1.14 GiB"}}; what the machine has left is not part of a plan."""
    found, at = {}, None
    for line in text.splitlines():
        if line.startswith("memory plan"):
            at = line.removeprefix("memory plan").removeprefix(" per rank").removeprefix(" of ") or "a rank"
        elif match := re.fullmatch(r"  (\S.*?)\s{2,}([0-9.]+ \S+)(?:\s+of .* available)?", line):
            if at:
                found.setdefault(at, {})[match[1]] = match[2]
        else:
            at = None
    return found


def memory_plan(own):
    def record(program, folder):
        settings = {**program.known(BASE), **own, "train.output_dir": "run"}
        (folder / "run.yaml").write_text(json.dumps(nested(settings)), encoding="utf-8")
        ranks = ranks_of({**BASE, **own})
        command = [program.path, "train", "run.yaml", *(["--ranks", ranks] if ranks > 1 else [])]
        code, text, errors = run(command, folder, address_space=ADDRESS_SPACE)
        plans = printed_plans(text)
        return flat(plans) if code == 3 and plans else refusal(code, errors)

    return record


def cases():
    return [Case(f"memory-plans/{name}", memory_plan(own)) for name, own in CONFIGURATIONS.items()]
