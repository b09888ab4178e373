"""Sparse attention over packed sequences as a torch operator.

    out = varlen_attn(q, k, v, cu_seqlens, config=AttentionConfig(budget=8192), budgets=budgets)

The operator is pure: what it chooses follows from its arguments, and the lists that its backward needs are a tensor whose
size follows from the shapes. So checkpointing, torch.compile and saved-tensor hooks work as with any other. Its name
contains flash_attn: selective checkpointing that saves such operators saves this one, too.

Computes on the CPU, in fp32; tensors of another type are computed in fp32 and rounded back.
"""

import dataclasses
import functools
import json

import torch
from torch import Tensor

from sparsebalance import _core

__all__ = ["AttentionConfig", "varlen_attn", "varlen_attn_seen"]


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Which keys a query sees; the keys of `attention` in run.yaml (docs/configuration.md).

    pattern: dense, topk, topp, mass or window. budget: keys per query where a call gives none. score `planes`, and `mass`,
    go by what earlier steps have shown: see varlen_attn_seen()."""

    pattern: str = "topk"
    budget: int = 8192
    selection: str = "causal"
    score: str = "moments"
    score_channels: int = 32
    score_tokens: int = 0
    block: int = 128
    query_block: int = 16
    sink_blocks: int = 1
    local_blocks: int = 2
    step: int = 1
    dense_below: int = -1
    coverage: float = 0.95
    dense_layers: tuple[int, ...] = ()

    # All of the above as one string, which is how an operator takes it.
    spec: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(int(layer) for layer in self.dense_layers))
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        object.__setattr__(self, "spec", json.dumps(fields, separators=(",", ":")))
        _attention(self.spec, 1)  # says what is wrong

    @property
    def measures_planes(self) -> bool:
        return self.score == "planes" and self.pattern in ("topk", "topp", "mass")


@functools.lru_cache(maxsize=256)
def _attention(spec: str, threads: int) -> _core.PackedAttention:
    return _core.PackedAttention(**json.loads(spec), threads=threads)


@functools.lru_cache(maxsize=256)
def _config(spec: str) -> AttentionConfig:
    return AttentionConfig(**json.loads(spec))


def _memory(tensor: Tensor) -> _core.Memory:
    return _core.Memory(tensor.data_ptr(), tensor.numel()) if tensor.numel() else _core.Memory(0, 0)


def _lists_bytes(config: AttentionConfig, tokens: int, sequences: int, kv_heads: int) -> int:
    """One for every (list head, query block, key block) that there may be."""
    if config.pattern == "dense":
        return 0
    return kv_heads * (tokens // config.query_block + sequences) * (tokens // config.block + 1)


def _call(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, budgets: Tensor, planes: Tensor, thresholds: Tensor, scale: float,
    layer: int, out: Tensor, lse: Tensor, lists: Tensor,
) -> _core.PackedCall:  # fmt: skip
    return _core.PackedCall(
        layer=layer,
        tokens=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=scale,
        cu_seqlens=_memory(cu_seqlens),
        budgets=_memory(budgets),
        lists=_memory(lists),
        planes=_memory(planes),
        thresholds=_memory(thresholds),
        q=_memory(q),
        k=_memory(k),
        v=_memory(v),
        out=_memory(out),
        lse=_memory(lse),
    )


def _outputs(q: Tensor, k: Tensor, cu_seqlens: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    config = _config(spec)
    sequences = cu_seqlens.shape[0] - 1
    sums = 1 + 3 * k.shape[1] * k.shape[2] if config.measures_planes else 0
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty((q.shape[1], q.shape[0])),
        q.new_empty((_lists_bytes(config, q.shape[0], sequences, k.shape[1]),), dtype=torch.uint8),
        q.new_empty((sequences, 2), dtype=torch.int64),
        q.new_empty((sums,), dtype=torch.float64),
    )


@torch.library.custom_op("sparsebalance::flash_attn_varlen_fwd", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, budgets: Tensor, planes: Tensor, thresholds: Tensor, spec: str,
    scale: float, layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, lse, lists, counts, sums = _outputs(q, k, cu_seqlens, spec)
    if q.shape[0] == 0:
        return out, lse, lists, counts.zero_(), sums.zero_()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    call = _call(q, k, v, cu_seqlens, budgets, planes, thresholds, scale, layer, out, lse, lists)
    _attention(spec, torch.get_num_threads()).forward(call, _memory(counts), _memory(sums))
    return out, lse, lists, counts, sums


@_forward.register_fake
def _(q, k, v, cu_seqlens, budgets, planes, thresholds, spec, scale, layer):  # type: ignore[no-untyped-def]
    return _outputs(q, k, cu_seqlens, spec)


@torch.library.custom_op("sparsebalance::flash_attn_varlen_bwd", mutates_args=(), device_types="cpu")
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Tensor, cu_seqlens: Tensor,
    budgets: Tensor, thresholds: Tensor, spec: str, scale: float, layer: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.shape[0] == 0:
        return dq, dk, dv
    dout, q, k, v, out, lse = (x.contiguous() for x in (dout, q, k, v, out, lse))
    none = q.new_empty((0,), dtype=torch.float64)
    call = _call(q, k, v, cu_seqlens, budgets, none, thresholds, scale, layer, out, lse, lists)
    _attention(spec, torch.get_num_threads()).backward(call, *(_memory(x) for x in (dout, dq, dk, dv)))
    return dq, dk, dv


@_backward.register_fake
def _(dout, q, k, v, out, lse, lists, cu_seqlens, budgets, thresholds, spec, scale, layer):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, budgets, _, thresholds, ctx.spec, ctx.scale, ctx.layer = inputs
    out, lse, lists, counts, sums = output
    ctx.mark_non_differentiable(lse, lists, counts, sums)
    ctx.save_for_backward(q, k, v, out, lse, lists, cu_seqlens, budgets, thresholds)


def _differentiate(ctx, dout, *_):  # type: ignore[no-untyped-def]
    gradients = _backward(dout, *ctx.saved_tensors, ctx.spec, ctx.scale, ctx.layer)
    return *gradients, None, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise _core.UserError(f"{name} has the shape {tuple(x.shape)}; [tokens, heads, head_dim] is needed")
        if x.device.type != "cpu":
            raise _core.UserError(f"{name} is on {x.device}; sparsebalance.torch computes on the CPU in this version")
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dtype != q.dtype:
            raise _core.UserError(f"{name} is {x.dtype}; q, k and v of one type are needed: float32, bfloat16 or float16")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise _core.UserError(f"q, k and v have the shapes {shapes}; q and k of the same tokens and width are needed")


def _int32(x: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.int32) if x is None else x.to("cpu", torch.int32).contiguous()


def varlen_attn_seen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    config: AttentionConfig,
    budgets: Tensor | None = None,
    scale: float | None = None,
    layer: int = 0,
    planes: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """varlen_attn() with what selection goes by and what it has seen: output, counts and sums.

    thresholds (pattern `mass`): float32 [sequences], added to what is assumed before anything is known; counts are int64
    [sequences, 2], key blocks chosen and wanted: where more are chosen than wanted, raise it. planes (score `planes`):
    float64 sums of earlier calls of this layer with the same score, as `sums` returns them; they may be added up."""
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    float64 = torch.empty(0, dtype=torch.float64) if planes is None else planes.to("cpu", torch.float64).contiguous()
    if thresholds is None:
        sequences = cu_seqlens.shape[0] - 1 if config.pattern == "mass" else 0
        thresholds = torch.zeros(sequences, dtype=torch.float32)
    thresholds = thresholds.to("cpu", torch.float32).contiguous()
    dtype = q.dtype
    if dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    out, _, _, counts, sums = _forward(
        q, k, v, _int32(cu_seqlens), _int32(budgets), float64, thresholds, config.spec, scale, layer
    )
    return out.to(dtype), counts, sums


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    config: AttentionConfig,
    budgets: Tensor | None = None,
    scale: float | None = None,
    layer: int = 0,
    planes: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Causal attention over packed sequences: q [tokens, heads, d], k and v [tokens, kv_heads, d], sequence i the tokens
    cu_seqlens[i] to cu_seqlens[i + 1]. budgets: keys per query of every sequence; None: the configured one. layer: for
    dense_layers. scale: 1/sqrt(d) where not given."""
    return varlen_attn_seen(
        q, k, v, cu_seqlens, config=config, budgets=budgets, scale=scale, layer=layer, planes=planes, thresholds=thresholds
    )[0]
