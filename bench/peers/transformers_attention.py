"""Training steps of Qwen2.5-3B's shape in transformers with our attention against the same with sdpa, and what the operator
takes of the host in a call. bf16 weights, fused AdamW, gradient checkpointing, the loss in chunks, random weights; ours with
mass lists by planes at 8192 keys per query. sdpa with the kernels that torch chooses by itself, and with cuDNN's first. A
result is the mean of the last two steps: `mass` needs some to learn thresholds that take as many keys as the budget says.

    transformers_attention.py [--profile] [--overhead] [--peers default cudnn] [TOKENS ...]
                                   32768 and 131072 without arguments; needs the package built with CUDA
    --profile: where the time of the device goes in one more step, by kernel
    --overhead: the operator's time of the host alone
"""

import argparse
import contextlib
import gc
import statistics
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


def train_step(model, optimizer, learner, ids, length):
    """The loss, and how many key blocks `mass` took of those it wanted."""
    hidden = model.model(input_ids=ids[:, :length]).last_hidden_state
    loss = chunked_loss(hidden[0], model.lm_head.weight, ids[0, 1 : length + 1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if learner is None:
        return loss, None
    counts = [one[3] for one in learner._counts]
    learner.learn()
    return loss, counts


def profile_step(step, name, rows=16):
    """Prints the kernels that take the most time of the device in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            known = kernels.setdefault(event.name, [0, 0.0])
            known[0] += 1
            known[1] += event.device_time_total / 1000 if hasattr(event, "device_time_total") else event.cuda_time_total / 1000
    print(f"{name}: {sum(ms for _, ms in kernels.values()):.0f} ms of the device in {sum(n for n, _ in kernels.values())} kernels")
    for kernel, (count, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:rows]:
        print(f"  {ms:8.1f} ms {count:6d} x {kernel[:110]}", flush=True)


SDPA = {"default": None, "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]}


def step_seconds(attention, tokens, steps, kernels=None, profile=False):
    """Of the last two steps, after a short one that warms up; the loss of the last, and the most memory in GiB."""
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
    with sdpa_kernel(kernels, set_priority=True) if kernels else contextlib.nullcontext():
        for length in (min(tokens, 16384), *[tokens] * steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loss, counts = train_step(model, optimizer, learner, ids, length)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            if counts:
                chosen, wanted = torch.cat(counts).sum(0).tolist()
                print(f"  {length} tokens in {seconds[-1]:.3f} s: {chosen / wanted:.3f} of the key blocks wanted", flush=True)
        result = statistics.mean(seconds[1:][-2:]), float(loss.detach()), torch.cuda.max_memory_allocated() / 2**30
        if profile:
            profile_step(lambda: train_step(model, optimizer, learner, ids, tokens), f"{tokens} tokens, {attention}")
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
    cu_seqlens = torch.tensor([0, 4096], dtype=torch.int32)
    learner, planes, thresholds = SelectionLearner(config), None, None
    if config.learns_thresholds:
        thresholds = torch.zeros(1)
    if config.measures_planes:
        learner.attend(q, k, v, cu_seqlens)
        learner.learn()
        planes = learner._planes_of(q, k, v, cu_seqlens, None, 0)
    seen = config.learns_thresholds or config.measures_planes
    call = sbt._packed_call(q, k, sbt._Small(cu_seqlens, None, planes, thresholds), 128**-0.5, 0)
    layout = sbt._layout(config.spec, True, 4096, 16, 128, 2, 1)
    out, kept = sbt._attend_directly(q, k, v, sbt._Job(config.spec, call, layout, None))
    attention = sbt._cuda_attention_for(config.spec, q)
    scratch = torch.empty(attention.scratch_bytes(4096, 16, 2, 128), dtype=torch.uint8, device="cuda")
    at, room = kept.data_ptr(), (scratch.data_ptr(), scratch.numel())
    places = (*(x.data_ptr() for x in (q, k, v, out)), at, at + layout.lists, layout.list_bytes)
    engine = host_microseconds(lambda: attention.forward(call, *places, at + layout.seen, *room))
    attend = lambda: sbt.varlen_attn(  # noqa: E731
        q, k, v, cu_seqlens, config=config, planes=planes, thresholds=thresholds, return_seen=seen
    )
    plain = host_microseconds(attend)
    for x in (q, k, v):
        x.requires_grad_()
    graded = host_microseconds(attend)
    dout, results = torch.randn_like(out), [torch.empty_like(x) for x in (q, k, v)]
    gradients = [x.data_ptr() for x in (dout, *results)]
    engine_back = host_microseconds(lambda: attention.backward(call, *places, *gradients, *room))
    with torch.no_grad():
        back = host_microseconds(lambda: sbt._gradients(config.spec, call, dout, q, k, v, out, *places[4:]))
    print(
        f"{name}: a forward takes {engine:.1f} us of the host in the engine, the operator {plain - engine:.1f} us more, "
        f"{graded - engine:.1f} us more where it records a graph; a backward {engine_back:.1f} us, "
        f"{back - engine_back:.1f} us more",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[32768, 131072])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--peers", nargs="+", choices=SDPA, default=list(SDPA))
    given = parser.parse_args()
    overhead(sbt.AttentionConfig(pattern="dense"), "dense")
    overhead(sbt.AttentionConfig(pattern="mass", score="planes", budget=2048), "mass by planes")
    for tokens in () if given.overhead else given.tokens:
        rates = {}
        for name in ("sparsebalance", *given.peers):
            ours = name == "sparsebalance"
            attention, steps = ("sparsebalance", 5) if ours else ("sdpa", 1 if tokens > 65536 else 3)
            seconds, loss, memory = step_seconds(attention, tokens, steps, SDPA.get(name), given.profile)
            rates[name] = tokens / seconds
            title = name if ours else f"sdpa, {name}"
            print(f"{tokens} tokens, {title}: {rates[name]:.0f} tokens/s, {memory:.1f} GiB, loss {loss:.3f}", flush=True)
        for peer in given.peers:
            ratio = rates["sparsebalance"] / rates[peer]
            print(f"{tokens} tokens: {ratio:.2f} times the tokens/s of sdpa, {peer}", flush=True)


if __name__ == "__main__":
    main()
