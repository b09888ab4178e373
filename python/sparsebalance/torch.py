"""Sparse attention over packed sequences as a torch operator.

    out = varlen_attn(q, k, v, cu_seqlens, config=AttentionConfig(budget=8192), budgets=budgets)

The operator is pure: what it chooses follows from its arguments, and the lists that its backward needs are a tensor whose
size follows from the shapes. So checkpointing, torch.compile and saved-tensor hooks work as with any other. Its name
contains flash_attn: selective checkpointing that saves such operators saves this one, too.

On CUDA it computes in bf16 or fp32, on the current stream, and waits for nothing but one copy of cu_seqlens where that is
on the device (once for a tensor, however many layers it goes through). On the CPU it computes in fp32; tensors of another
type are computed in fp32 and rounded back.
"""

import contextlib
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebalance import _core

__all__ = ["AttentionConfig", "OnceATensor", "Seen", "chosen_lists", "on_host", "varlen_attn"]


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Which keys a query sees; the keys of `attention` in run.yaml (docs/configuration.md).

    pattern: dense, topk, topp, mass or window. budget: keys per query where a call gives none. largest_budget: the most
    that calls on CUDA give, which the lists have room for; 0: twice the budget, or as much as it with `mass`. score
    `planes`, and `mass`, go by what earlier steps have shown: see sparsebalance.learner. score_channels: at 32, heads with
    fewer channels use all of them."""

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
    largest_budget: int = 0

    # All of the above as one string, which is how an operator takes it.
    spec: str = dataclasses.field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(int(layer) for layer in self.dense_layers))
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        object.__setattr__(self, "spec", json.dumps(fields, separators=(",", ":")))
        _cpu_attention(self.spec, 1)  # says what is wrong

    @property
    def measures_planes(self) -> bool:
        return self.score == "planes" and self.pattern in ("topk", "topp", "mass")

    @property
    def learns_thresholds(self) -> bool:
        return self.pattern == "mass" and self.selection == "causal"

    @property
    def settings(self) -> _core.AttentionSettings:
        return _settings(self.spec)


@functools.lru_cache(maxsize=256)
def _settings(spec: str) -> _core.AttentionSettings:
    return _core.AttentionSettings(**json.loads(spec))


@functools.lru_cache(maxsize=256)
def _config(spec: str) -> AttentionConfig:
    return AttentionConfig(**json.loads(spec))


@functools.lru_cache(maxsize=256)
def _settled(spec: str, width: int) -> str:
    """For heads of this width: a default of score_channels that they do not have is lowered, as in `sparsebalance train`."""
    config = _config(spec)
    if not config.measures_planes:
        return spec
    return dataclasses.replace(config, score_channels=config.settings.score_channels_of(width)).spec


@functools.lru_cache(maxsize=256)
def _cpu_attention(spec: str, threads: int) -> _core.PackedAttention:
    return _core.PackedAttention(_settings(spec), threads)


@functools.lru_cache(maxsize=64)
def _cuda_attention(spec: str, device: int, stream: int, deterministic: bool, portable: bool) -> _core.PackedCudaAttention:
    return _core.PackedCudaAttention(_settings(spec), device, stream, deterministic=deterministic, portable=portable)


# The portable CUDA kernels even where there are faster ones; for tests.
portable_kernels = False


_HERE = contextlib.nullcontext()


def _device_of(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """The device of q as the current one."""
    return _HERE if torch._C._cuda_getDevice() == q.device.index else torch.cuda.device(q.device)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise _core.UserError(
            "sparsebalance attention within the capture of a CUDA graph: what the host decides in a call would be that of "
            "the captured one in every replay. Leave attention out of the graph, or do not capture"
        )


def _cuda_attention_for(spec: str, q: Tensor) -> _core.PackedCudaAttention:
    _refuse_capture()
    device = q.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)  # torch.cuda.current_stream() without its objects
    return _cuda_attention(spec, device, stream, torch.are_deterministic_algorithms_enabled(), portable_kernels)


def _cpu_lists_bytes(config: AttentionConfig, tokens: int, sequences: int, kv_heads: int) -> int:
    """One for every (list head, query block, key block) that there may be."""
    if config.pattern == "dense":
        return 0
    return kv_heads * (tokens // config.query_block + sequences) * (tokens // config.block + 1)


_MOST_MULTIPROCESSORS = 256  # more than any GPU has: sizes must not depend on which one it is


def _cuda_lists_bytes(config: AttentionConfig, tokens: int, sequences: int, kv_heads: int) -> int:
    """Entries by rows and by columns, four bytes each, and the work of the backward; as the engine plans for them."""
    if config.pattern == "dense":
        return 0
    block = min(config.block, 128)
    blocks = tokens // block + sequences
    budget = max(2 * config.budget, (2 if config.pattern == "mass" else 1) * config.largest_budget)
    always = (config.sink_blocks + config.local_blocks + 2) * (config.block // block)
    listed = torch.sym_min(blocks, (budget + config.query_block) // block + always)
    if config.pattern == "mass" and config.selection == "lookahead":  # any query block may take everything
        listed = blocks
    rows = kv_heads * (tokens // config.query_block + sequences)
    item, split = 48, 28
    return 8 * rows * listed + kv_heads * blocks * (4 + item) + 3 * _MOST_MULTIPROCESSORS * (item + split) + 16384


def _lists_bytes(config: AttentionConfig, cuda: bool, tokens: int, sequences: int, kv_heads: int) -> int:
    return (_cuda_lists_bytes if cuda else _cpu_lists_bytes)(config, tokens, sequences, kv_heads)


def _place(x: Tensor | None) -> tuple[int, int]:
    """Address and number of elements."""
    return (0, 0) if x is None else (x.data_ptr(), x.numel())


class _Small(NamedTuple):
    """What a call has beside its tensors and numbers, in host memory. None: nothing."""

    cu_seqlens: Tensor
    budgets: Tensor | None
    planes: Tensor | None
    thresholds: Tensor | None


def _packed_call(q: Tensor, k: Tensor, small: _Small, scale: float, layer: int) -> _core.PackedCall:
    tokens, heads, width = q.shape
    return _core.PackedCall(
        layer, tokens, heads, k.shape[1], width, scale, q.dtype is torch.bfloat16, q.is_cuda, *_place(small.cu_seqlens),
        *_place(small.budgets), *_place(small.planes), *_place(small.thresholds),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _scratch_bytes(attention: _core.PackedCudaAttention, tokens: int, heads: int, width: int, kv_heads: int) -> int:
    return attention.scratch_bytes(tokens, heads, kv_heads, width)


_SMALL_SCRATCH = 64 << 20  # bytes
_small_scratch: dict[_core.PackedCudaAttention, Tensor] = {}


def _scratch(attention: _core.PackedCudaAttention, q: Tensor, k: Tensor) -> Tensor:
    """Memory for temporaries. Where it is small it stays for the next call: all of an attention's are on one stream."""
    size = _scratch_bytes(attention, *q.shape, k.shape[1])
    if size > _SMALL_SCRATCH:
        return q.new_empty(size, dtype=torch.uint8)
    known = _small_scratch.get(attention)
    if known is None or known.numel() < size:
        if len(_small_scratch) >= 16:  # streams that are no more
            _small_scratch.clear()
        known = _small_scratch[attention] = q.new_empty(size, dtype=torch.uint8)
    return known


def _compute(
    backward: bool, spec: str, call: _core.PackedCall, q: Tensor, k: Tensor, *places: int, host_lists: Tensor | None = None
) -> None:
    """The engine's forward or backward, on the device of q. host_lists: gets the lists of a forward on CUDA, too."""
    spec = _settled(spec, q.shape[2])
    if not q.is_cuda:
        attention = _cpu_attention(spec, torch.get_num_threads())
        (attention.backward if backward else attention.forward)(call, *places)
        return
    with _device_of(q):
        attention = _cuda_attention_for(spec, q)
        scratch = _scratch(attention, q, k)
        more = () if host_lists is None else _place(host_lists)
        (attention.backward if backward else attention.forward)(call, *places, *_place(scratch), *more)


def _seen_sizes(config: AttentionConfig, sequences: int, kv_heads: int, width: int) -> tuple[int, int]:
    """Numbers of what a call has seen (Seen): counts and sums."""
    return 2 * sequences if config.learns_thresholds else 0, 1 + 3 * kv_heads * width if config.measures_planes else 0


def _outputs(q: Tensor, k: Tensor, cu_seqlens: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = _config(spec)
    (tokens, heads, width), kv_heads, sequences = q.shape, k.shape[1], cu_seqlens.shape[0] - 1
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty((heads, tokens), dtype=torch.float32),
        q.new_empty((_lists_bytes(config, q.is_cuda, tokens, sequences, kv_heads),), dtype=torch.uint8),
        q.new_empty((sum(_seen_sizes(config, sequences, kv_heads, width)),), dtype=torch.int64),
    )


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, budgets: Tensor, planes: Tensor, thresholds: Tensor, spec: str,
    scale: float, layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v)
    out, lse, lists, seen = outputs = _outputs(q, k, cu_seqlens, spec)
    if q.shape[0] == 0:
        seen.zero_()
        return outputs
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    call = _packed_call(q, k, _Small(cu_seqlens, budgets, planes, thresholds), scale, layer)
    _compute(
        False, spec, call, q, k, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *_place(lists),
        seen.data_ptr(),
    )  # fmt: skip
    return outputs


def _run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Tensor, cu_seqlens: Tensor,
    budgets: Tensor, thresholds: Tensor, spec: str, scale: float, layer: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v)
    if not (dout.shape == out.shape == q.shape and lse.shape == (q.shape[1], q.shape[0])):
        shapes = ", ".join(str(tuple(x.shape)) for x in (dout, out, q, lse))
        raise _core.UserError(f"dout, out, q and lse have the shapes {shapes}; they are of different calls")
    if q.shape[0] == 0:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    call = _packed_call(q, k, _Small(cu_seqlens, budgets, None, thresholds), scale, layer)
    lse = lse.contiguous()
    return _gradients(spec, call, dout, q, k, v, out, lse.data_ptr(), *_place(lists))


def _gradients(
    spec: str, call: _core.PackedCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: int, lists: int,
    list_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dout, q, k, v, out = dout.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _compute(
        True, spec, call, q, k, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse, lists, list_bytes,
        dout.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
    )  # fmt: skip
    return dq, dk, dv


_forward = torch.library.custom_op("sparsebalance::flash_attn_varlen_fwd", _run_forward, mutates_args=())
_backward = torch.library.custom_op("sparsebalance::flash_attn_varlen_bwd", _run_backward, mutates_args=())


@_forward.register_fake
def _(q, k, v, cu_seqlens, budgets, planes, thresholds, spec, scale, layer):  # type: ignore[no-untyped-def]
    return _outputs(q, k, cu_seqlens, spec)


@_backward.register_fake
def _(dout, q, k, v, out, lse, lists, cu_seqlens, budgets, thresholds, spec, scale, layer):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, budgets, _, thresholds, ctx.spec, ctx.scale, ctx.layer = inputs
    out, lse, lists, seen = output
    ctx.mark_non_differentiable(lse, lists, seen)
    ctx.save_for_backward(q, k, v, out, lse, lists, cu_seqlens, budgets, thresholds)


def _differentiate(ctx, dout, *_):  # type: ignore[no-untyped-def]
    gradients = _backward(dout, *ctx.saved_tensors, ctx.spec, ctx.scale, ctx.layer)
    return *gradients, None, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


class _Layout(NamedTuple):
    """Where everything lies that a direct call keeps beside its output, in one piece of memory; in bytes."""

    lists: int  # behind the log-sum-exps
    list_bytes: int
    seen: int
    seen_values: int  # of eight bytes
    bytes: int


@functools.lru_cache(maxsize=1024)
def _layout(spec: str, cuda: bool, tokens: int, heads: int, width: int, kv_heads: int, sequences: int) -> _Layout:
    config, whole = _config(spec), lambda size: -(-size // 512) * 512
    list_bytes = _lists_bytes(config, cuda, tokens, sequences, kv_heads)
    values = sum(_seen_sizes(config, sequences, kv_heads, width))
    lists = whole(4 * heads * tokens)
    seen = whole(lists + list_bytes)
    return _Layout(lists, list_bytes, seen, values, seen + 8 * values)


class _Job(NamedTuple):
    """What a direct call has beside q, k and v. seen: filled by it where it is wanted."""

    spec: str
    call: _core.PackedCall
    layout: _Layout
    seen: Tensor | None


def _attend_directly(
    q: Tensor, k: Tensor, v: Tensor, job: _Job, host_lists: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and what backward needs."""
    spec, call, layout, seen = job
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    kept = q.new_empty(layout.bytes, dtype=torch.uint8)
    if q.shape[0] > 0:
        at = kept.data_ptr()
        _compute(
            False, spec, call, q, k, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), at, at + layout.lists,
            layout.list_bytes, at + layout.seen if seen is None else seen.data_ptr(), host_lists=host_lists,
        )  # fmt: skip
    return out, kept


class _Direct(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes several times as long as everything else here."""

    @staticmethod
    def forward(ctx, q, k, v, job):  # type: ignore[no-untyped-def]
        out, kept = _attend_directly(q, k, v, job)
        ctx.job = job
        ctx.save_for_backward(q, k, v, out, kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        q, k, v, out, kept = ctx.saved_tensors
        if q.shape[0] == 0:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
        job, at = ctx.job, kept.data_ptr()
        places = at, at + job.layout.lists, job.layout.list_bytes
        return *_gradients(job.spec, job.call, dout, q, k, v, out, *places), None


# Its apply() without what that of torch.autograd.Function does for functorch's transforms, within which nothing comes here.
_apply_directly = super(torch.autograd.Function, _Direct).apply


class Seen:
    """What selection has seen in a call, for sparsebalance.learner."""

    __slots__ = ("_sequences", "_values")

    def __init__(self, values: Tensor, sequences: int) -> None:
        self._values, self._sequences = values, sequences

    @property
    def counts(self) -> Tensor:
        """Pattern `mass`: int64 [sequences, 2], key blocks chosen and wanted."""
        return self._values[: 2 * self._sequences].view(-1, 2)

    @property
    def sums(self) -> Tensor:
        """Score `planes`: float64, tokens sampled and sums over them, which may be added up."""
        return self._values[2 * self._sequences :].view(torch.float64)


_PLAIN = (Tensor, torch.nn.Parameter)


def _watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether anybody wants to see the operator: a compiler, a mode such as selective checkpointing's, a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, small: _Small, config: AttentionConfig, scale: float, layer: int, wants_seen: bool
) -> tuple[Tensor, Seen | None]:
    sequences = small.cu_seqlens.shape[0] - 1
    counted = sequences if config.learns_thresholds else 0
    if _watched(q, k, v):
        given = (torch.empty(0, dtype=torch.int32) if x is None else x for x in small)
        out, _, _, values = _forward(q, k, v, *given, config.spec, scale, layer)
        return out, Seen(values, counted) if wants_seen else None
    layout = _layout(config.spec, q.is_cuda, *q.shape, k.shape[1], sequences)
    values = None
    if wants_seen:
        values = (q.new_empty if q.shape[0] > 0 else q.new_zeros)(layout.seen_values, dtype=torch.int64)
    job = _Job(config.spec, _packed_call(q, k, small, scale, layer), layout, values)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out = _apply_directly(q, k, v, job)
    else:
        out, _ = _attend_directly(q, k, v, job)
    return out, Seen(values, counted) if wants_seen else None


_HAS_CUDA = "with CUDA" in _core.__build__


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What _check() looks at one by one, at once: nearly always it is right."""
    of_q, of_k, dtype, device = q.shape, k.shape, q.dtype, q.device
    return (
        len(of_q) == len(of_k) == 3
        and of_k == v.shape
        and of_q[0] == of_k[0]
        and of_q[2] == of_k[2]
        and dtype == k.dtype == v.dtype
        and (dtype == torch.bfloat16 or dtype == torch.float32)
        and device == k.device == v.device
        and (device.type == "cpu" or (device.type == "cuda" and _HAS_CUDA))
    )


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if _fits(q, k, v):
        return
    device = q.device.type
    if device == "cuda" and not _HAS_CUDA:
        raise _core.UserError(
            f"q is on {q.device}, and this build of sparsebalance has no CUDA: "
            "build it where nvcc is, pip install . -C cmake.define.SB_CUDA=ON"
        )
    if device not in ("cpu", "cuda"):
        raise _core.UserError(f"q is on {q.device}; sparsebalance.torch computes on cpu and cuda")
    types = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise _core.UserError(f"{name} has the shape {tuple(x.shape)}; [tokens, heads, head_dim] is needed")
        if x.device != q.device:
            raise _core.UserError(f"{name} is on {x.device} and q on {q.device}")
        if x.dtype not in types or x.dtype != q.dtype:
            wanted = " or ".join(str(dtype) for dtype in types)
            raise _core.UserError(f"{name} is {x.dtype}; on {device} q, k and v of one type are needed: {wanted}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise _core.UserError(f"q, k and v have the shapes {shapes}; q and k of the same tokens and width are needed")


class OnceATensor:
    """A function of a tensor that is not computed again while the tensor is there and unchanged: what every layer asks for
    waits for the device once. Inference tensors do not say when they change, and are computed anew."""

    def __init__(self, function: Callable[[Tensor], Any], most: int = 64) -> None:
        self._function, self._most = function, most
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Any]] = {}

    def __call__(self, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return self._function(x)
        if x.is_cuda:
            _refuse_capture()
        if x.is_inference():
            return self._function(x)
        known = self._known.get(id(x))
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        result = self._function(x)
        self._known.pop(id(x), None)
        if len(self._known) >= self._most:
            self._known.pop(next(iter(self._known)))
        gone = functools.partial(self._forget, id(x))
        self._known[id(x)] = (weakref.ref(x, gone), x._version, result)
        return result

    def _forget(self, place: int, gone: "weakref.ref[Tensor]") -> None:
        if place in self._known and self._known[place][0] is gone:
            del self._known[place]


_copy_to_host = OnceATensor(lambda x: x.to("cpu", torch.int32).contiguous())


def on_host(x: Tensor) -> Tensor:
    """An int32 tensor in host memory with the values of x; copied from a device once, however often it is asked for."""
    if x.is_cuda:
        return _copy_to_host(x)
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def _host_values(x: Tensor | Sequence[int] | None) -> Tensor | None:
    if x is None:
        return None
    return on_host(x) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int32)


def _small(
    cu_seqlens: Tensor | Sequence[int], budgets: Tensor | Sequence[int] | None, planes: Tensor | None,
    thresholds: Tensor | None,
) -> _Small:  # fmt: skip
    if thresholds is not None and (thresholds.is_cuda or thresholds.dtype != torch.float32 or not thresholds.is_contiguous()):
        thresholds = thresholds.to("cpu", torch.float32).contiguous()
    return _Small(_host_values(cu_seqlens), _host_values(budgets), _host_values(planes), thresholds)


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    config: AttentionConfig,
    budgets: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    layer: int = 0,
    planes: Tensor | None = None,
    thresholds: Tensor | None = None,
    return_seen: bool = False,
) -> Tensor | tuple[Tensor, Seen]:
    """Causal attention over packed sequences: q [tokens, heads, d], k and v [tokens, kv_heads, d], sequence i the tokens
    cu_seqlens[i] to cu_seqlens[i + 1]. budgets: keys per query of every sequence; None: the configured one. layer: for
    dense_layers. scale: 1/sqrt(d) where not given.

    planes (score `planes`) and thresholds (pattern `mass`) are what a learner says; with return_seen the result comes with
    what it learns from. thresholds: float32 [sequences], added to what is assumed before anything is known."""
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    small = _small(cu_seqlens, budgets, planes, thresholds)
    dtype = q.dtype
    if dtype != torch.float32 and not q.is_cuda:
        q, k, v = q.float(), k.float(), v.float()
    out, seen = _attend(q, k, v, small, config, scale, layer, return_seen)
    if out.dtype != dtype:
        out = out.to(dtype)
    return (out, seen) if return_seen else out


@torch.no_grad()
def chosen_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    config: AttentionConfig,
    budgets: Tensor | Sequence[int] | None = None,
    layer: int = 0,
    planes: Tensor | None = None,
    thresholds: Tensor | None = None,
) -> Tensor:
    """What varlen_attn() chooses, for those who want to look: uint8 [rows, tokens // block + 1] in host memory, a row for
    every query block of every (sequence that does not run dense, kv head), and in it of every key block the first token of
    the query block that sees it; 255: none does. Rows behind the last are 255 all through. Waits for the device."""
    _check(q, k, v)
    small = _small(cu_seqlens, budgets, planes, thresholds)
    if not q.is_cuda:
        q, k, v = q.float(), k.float(), v.float()
    (tokens, heads, width), kv_heads, sequences = q.shape, k.shape[1], small.cu_seqlens.shape[0] - 1
    call = _packed_call(q, k, small, width**-0.5, layer)
    layout = _layout(config.spec, q.is_cuda, tokens, heads, width, kv_heads, sequences)
    host = torch.empty(_lists_bytes(config, False, tokens, sequences, kv_heads), dtype=torch.uint8) if q.is_cuda else None
    _, kept = _attend_directly(q, k, v, _Job(config.spec, call, layout, None), host)
    lists = kept[layout.lists : layout.lists + layout.list_bytes] if host is None else host
    return lists.view(-1, tokens // config.block + 1)
