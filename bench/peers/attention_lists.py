"""FlexAttention on the very lists of bench/attention/hopper/attention_bench.cu (query blocks of 128, shared by the query
heads of a group), and cuDNN and FlashAttention-2 dense, beside it. Useful FLOPs: 4·d for every selected (query, key)
pair and head, 2.5 times that backward."""
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

DEVICE, BLOCK = "cuda", 128
ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = [ROOT / "build/cuda/bench/attention/attention_hopper_bench", ROOT / "build/hopper/attention_bench"]
REST = 0.25  # seconds before a measurement, as in our own benchmark


def call_times_ms(body, calls):
    """Of each of so many calls. They are queued without waiting, so that the host's work is in none of them."""
    borders = [torch.cuda.Event(True) for _ in range(calls + 1)]
    borders[0].record()
    for border in borders[1:]:
        body()  # keeps no result: all of them together would take gigabytes, and new memory for every call
        border.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(borders, borders[1:])]


def median_ms(body, flops):
    repeats = 5 if flops > 2e13 else 11 if flops > 2e12 else 15  # as ours
    for _ in range(3):
        body()
    return sorted(call_times_ms(body, repeats))[repeats // 2]


def lasting_ms(body, once):
    """At the power limit: the last 0.5 of 0.7 s of calls after a rest, of which one takes about `once` ms."""
    torch.cuda.synchronize()
    time.sleep(REST)
    times = call_times_ms(body, max(3, int(700 / once)))
    first, before = 0, 0
    while before < 200 and first + 1 < len(times):
        before += times[first]
        first += 1
    return sum(times[first:]) / (len(times) - first)


def mix(x):
    m = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & m
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & m
    return x ^ (x >> 16)


def kept_blocks(kv_heads, n, keep):
    """The same draw as block_kept() in tests/attention/gpu/hopper/device_case.h."""
    h = torch.arange(kv_heads).view(-1, 1, 1)
    q = torch.arange(n).view(1, -1, 1)
    k = torch.arange(n).view(1, 1, -1)
    draw = mix((h * 0x9E3779B1 + q * 0x85EBCA77 + k * 0xC2B2AE3D) & 0xFFFFFFFF)
    causal = torch.ones(n, n, dtype=torch.bool).tril(-1)
    return ((draw < keep * 4294967296.0) & causal) | torch.eye(n, dtype=torch.bool)


def tensors(heads, kv_heads, d, s):
    make = lambda h: torch.randn(1, h, s, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    return make(heads), make(kv_heads), make(kv_heads), torch.randn(1, heads, s, d, device=DEVICE, dtype=torch.bfloat16)


def report(name, forward, inputs, d_o, flops):
    try:
        torch.cuda.synchronize()
        forward()  # compiles
        torch.cuda.synchronize()
        time.sleep(REST)
        f = median_ms(forward, flops)
        out = forward()
        backward = lambda: torch.autograd.grad(out, inputs, d_o, retain_graph=True)
        backward()
        torch.cuda.synchronize()
        time.sleep(REST)
        b = median_ms(backward, flops)
        f_lasting, b_lasting = lasting_ms(forward, f), lasting_ms(backward, b)
        rate = lambda ms: f"{flops / ms / 1e9:.0f}"
        print(f"{name:<44} {f:8.3f} {rate(f):>6} | {b:8.3f} {rate(b / 2.5):>6}"
              f" | in a row {rate(f_lasting)} / {rate(b_lasting / 2.5)}", flush=True)
    except Exception as error:  # a backend that refuses the shape must not hide the others
        print(f"{name:<44} {str(error)[:120]}", flush=True)


def dense(heads, kv_heads, d, s):
    q, k, v, d_o = tensors(heads, kv_heads, d, s)
    flops = 4.0 * d * heads * s * (s + 1) / 2
    for name, backend in [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention-2", SDPBackend.FLASH_ATTENTION)]:
        with sdpa_kernel(backend):
            forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            report(f"{name} dense {heads}:{kv_heads} d{d} {s // 1024}K", forward, (q, k, v), d_o, flops)


compiled = torch.compile(flex_attention, dynamic=False)


def trained_blocks():
    """What bench/attention/dump_lists wrote: chosen blocks of a trained model, query blocks of 128."""
    data = (ROOT / "bench/attention/trained_lists_32k.bin").read_bytes()
    heads, rows, blocks, query_block, block = struct.unpack("5i", data[:20])
    assert query_block == block == BLOCK
    return torch.frombuffer(bytearray(data[20:]), dtype=torch.uint8).view(heads, rows, blocks) == 0


def sparse(heads, kv_heads, d, s, name, blocks):
    n = s // BLOCK
    mask = blocks.repeat_interleave(heads // kv_heads, 0)[None].to(DEVICE)
    diagonal = torch.eye(n, dtype=torch.bool, device=DEVICE).expand_as(mask)

    def lists(m):
        return m.sum(-1).int().contiguous(), torch.argsort(m.int(), dim=-1, descending=True, stable=True).int().contiguous()

    block_mask = BlockMask.from_kv_blocks(*lists(diagonal), *lists(mask & ~diagonal), BLOCK_SIZE=BLOCK,
                                          mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(s, s))
    q, k, v, d_o = tensors(heads, kv_heads, d, s)
    pairs = (mask & ~diagonal).sum().item() * BLOCK * BLOCK + heads * n * BLOCK * (BLOCK + 1) / 2
    report(f"FlexAttention {name} {heads}:{kv_heads} d{d} {s // 1024}K qb128",
           lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=True), (q, k, v), d_o, 4.0 * d * pairs)


def ours(q, k, v, d_o):
    """Our kernels on the same operands, through files."""
    binary = next((path for path in OURS if path.exists()), None)
    if binary is None:
        return None
    heads, s, d = q.shape[1:]
    with tempfile.TemporaryDirectory() as directory:
        packed = lambda t: t.detach()[0].transpose(0, 1).contiguous().view(torch.int16).cpu().numpy()
        for name, tensor in zip(("q", "k", "v", "do"), (q, k, v, d_o)):
            packed(tensor).tofile(f"{directory}/{name}")
        subprocess.run([binary, "files", directory, *map(str, (heads, k.shape[1], d, s))], check=True)

        def read(name, like):
            data = torch.frombuffer(bytearray(pathlib.Path(directory, name).read_bytes()), dtype=torch.bfloat16)
            return data.view(s, like.shape[1], d).transpose(0, 1)[None].to(DEVICE)

        return [read("o", q), read("dq", q), read("dk", k), read("dv", v)]


def errors(heads, kv_heads, d, s, peak=1):
    """Relative (Frobenius) errors against fp64, ours and the dense peers' on the same operands. A large `peak` makes
    rows that see little but a few keys."""
    q, k, v, d_o = tensors(heads, kv_heads, d, s)
    q = (peak * q.detach()).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    group = heads // kv_heads
    scores = exact[0] @ exact[1].repeat_interleave(group, 1).transpose(-1, -2) / d**0.5
    causal = torch.ones(s, s, dtype=torch.bool, device=DEVICE).tril()
    want = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ exact[2].repeat_interleave(group, 1)
    want = [want, *torch.autograd.grad(want, exact, d_o.double())]

    def show(name, got):
        relative = [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want)]
        print(f"{name} errors {heads}:{kv_heads} d{d} {s}{f' q x {peak}' if peak > 1 else ''}:",
              *(f"{n} {r:.2e}" for n, r in zip(("o", "dq", "dk", "dv"), relative)), flush=True)

    got = ours(q, k, v, d_o)
    if got is not None:
        show("ours", got)
    for name, backend in [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention-2", SDPBackend.FLASH_ATTENTION)]:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            show(name, [out, *torch.autograd.grad(out, (q, k, v), d_o)])


if __name__ == "__main__":
    errors(8, 1, 128, 1000)
    errors(8, 1, 64, 1000)
    errors(14, 2, 64, 3000)
    errors(8, 1, 128, 1000, 4)
    errors(14, 2, 64, 3000, 4)
    errors(8, 1, 128, 3000, 2)
    if sys.argv[1:] == ["errors"]:
        sys.exit()
    print(f"{'PyTorch ' + torch.__version__:<44} {'fwd ms':>8} {'TF/s':>6} | {'bwd ms':>8} {'TF/s':>6}")
    for shape in [(16, 2, 128), (14, 2, 64)]:
        dense(*shape, 32768)
        sparse(*shape, 32768, "10%", kept_blocks(shape[1], 32768 // BLOCK, 0.1))
        sparse(*shape, 32768, "trained", trained_blocks())
    sparse(16, 2, 128, 65536, "10%", kept_blocks(2, 65536 // BLOCK, 0.1))
