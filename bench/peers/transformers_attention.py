"""Training steps of Qwen2.5-3B's shape in transformers with our attention against the same with sdpa, and what the operator
takes of the host in a call. bf16 weights, fused AdamW, gradient checkpointing, the loss in chunks, random weights; ours with
mass lists by planes at 8192 keys per query. sdpa is given cuDNN's kernels first.

    transformers_attention.py [TOKENS ...]        32768 and 131072 without arguments; needs the package built with CUDA
"""

import gc
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

import sparsebalance.torch as sbt
import sparsebalance.transformers as sbtr
from sparsebalance.learner import SelectionLearner

SIZES = dict(
    hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
    tie_word_embeddings=True, vocab_size=151936, rope_theta=1e6, use_cache=False,
)  # fmt: skip
OURS = sbt.AttentionConfig(pattern="mass", score="planes", budget=8192)


def chunked_loss(hidden, weight, labels, chunk=4096):
    def part(rows, targets):
        return torch.nn.functional.cross_entropy((rows @ weight.t()).float(), targets, reduction="sum")

    pieces = zip(hidden.split(chunk), labels.split(chunk))
    return sum(checkpoint(part, *piece, use_reentrant=False) for piece in pieces) / len(labels)


def step_seconds(attention, tokens, steps):
    """Of the fastest step after a short one that warms up, the loss of the last, and the most memory in GiB."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, max_position_embeddings=tokens, attn_implementation=attention)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    learner = sbtr.configure(model, OURS) if attention == "sparsebalance" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, 150000, (1, tokens + 1), device="cuda")
    seconds = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        for length in (min(tokens, 16384), *[tokens] * steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            hidden = model.model(input_ids=ids[:, :length]).last_hidden_state
            loss = chunked_loss(hidden[0], model.lm_head.weight, ids[0, 1 : length + 1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if learner is not None:
                learner.learn()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    result = min(seconds[1:]), float(loss.detach()), torch.cuda.max_memory_allocated() / 2**30
    del model, optimizer, learner
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return result


def host_microseconds(function, calls=200):
    """Of the host alone: the device is kept busy meanwhile, and what is queued fits its queue."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)
    best = float("inf")
    for _ in range(calls // 20):
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        begin = time.perf_counter()
        for _ in range(20):
            function()
        best = min(best, (time.perf_counter() - begin) / 20)
    return best * 1e6


def overhead(config, name):
    """Host time of the operator forward and backward, beside that of the engine's own calls below it."""
    q, k, v = (torch.randn(4096, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 2, 2))
    cu_seqlens, none = torch.tensor([0, 4096], dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    thresholds = torch.zeros(1 if config.pattern == "mass" else 0)
    learner, planes = SelectionLearner(config), none
    if config.measures_planes:
        learner.attend(q, k, v, cu_seqlens)
        learner.learn()
        planes = learner._planes_of(q, k, v, cu_seqlens, None, 0)
    out, lse, lists, counts, sums = sbt._run_forward(q, k, v, cu_seqlens, none, planes, thresholds, config.spec, 0.1, 0)
    attention = sbt._cuda_attention_for(config.spec, q)
    scratch = sbt._scratch(attention, q, k, 0.1)
    call = sbt._call(q, k, v, cu_seqlens, none, planes, thresholds, 0.1, 0, out, lse, lists)
    seen = [sbt._memory(x) for x in (counts, sums, scratch)]
    engine = host_microseconds(lambda: attention.forward(call, *seen))
    operator = host_microseconds(
        lambda: sbt.varlen_attn(q, k, v, cu_seqlens, config=config, planes=planes, thresholds=thresholds, return_seen=True)
    )
    for x in (q, k, v):
        x.requires_grad_()
    graded = host_microseconds(
        lambda: sbt.varlen_attn(q, k, v, cu_seqlens, config=config, planes=planes, thresholds=thresholds, return_seen=True)
    )
    dout = torch.randn_like(out)
    arguments = (dout, q, k, v, out, lse, lists, cu_seqlens, none, thresholds, config.spec, 0.1, 0)
    gradients = [sbt._memory(x) for x in (dout, *(torch.empty_like(x) for x in (q, k, v)))]
    engine_back = host_microseconds(lambda: attention.backward(call, *gradients, sbt._memory(scratch)))
    with torch.no_grad():
        back = host_microseconds(lambda: sbt._run_backward(*arguments))
    print(
        f"{name}: a forward takes {engine:.1f} us of the host in the engine, the operator {operator - engine:.1f} us more, "
        f"{graded - engine:.1f} us more where it records a graph; a backward {engine_back:.1f} us, "
        f"{back - engine_back:.1f} us more",
        flush=True,
    )


def main():
    overhead(sbt.AttentionConfig(pattern="dense"), "dense")
    overhead(sbt.AttentionConfig(pattern="mass", score="planes", budget=2048), "mass by planes")
    for tokens in map(int, sys.argv[1:] or (32768, 131072)):
        rates = {}
        for attention in ("sparsebalance", "sdpa"):
            seconds, loss, memory = step_seconds(attention, tokens, 1 if tokens > 65536 and attention == "sdpa" else 2)
            rates[attention] = tokens / seconds
            print(f"{tokens} tokens, {attention}: {tokens / seconds:.0f} tokens/s, {memory:.1f} GiB, loss {loss:.3f}", flush=True)
        print(f"{tokens} tokens: {rates['sparsebalance'] / rates['sdpa']:.2f} times the tokens/s of sdpa", flush=True)


if __name__ == "__main__":
    main()
