"""Sparse attention for models of transformers.

    import sparsebalance.transformers as sbt
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sparsebalance")
    learner = sbt.configure(model, AttentionConfig(pattern="mass", score="planes", budget=8192))
    ...
    optimizer.step()
    learner.learn()                         # sparsebalance.trainer.LearningCallback does it for Trainer

Packed batches are told apart by, in this order: cu_seq_lens_q, position_ids that restart (batch of one), a 2-D mask;
otherwise every row is a sequence. `sb_budgets` (int [layers, sequences]) in the batch gives every sequence its budget.
"""

import json
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparsebalance import _core
from sparsebalance.learner import SelectionLearner
from sparsebalance.torch import AttentionConfig, OnceATensor, on_host, varlen_attn

__all__ = ["attention_forward", "configure", "install", "learner_of"]

_KEY = "sparsebalance_attention"  # of a model's config
_LEARNER = "_sparsebalance_learner"  # of the modules that attend
_configs: dict[str, AttentionConfig] = {}
_default = [AttentionConfig()]
_warned: set[str] = set()


def configure(model: Any, config: AttentionConfig) -> SelectionLearner | None:
    """Sets what the attention of a model does; it is saved with the model's config. With `mass` or `score: planes`, what
    learns from step to step: its learn() is to be called after every step, and its state_dict() belongs to checkpoints.
    It warns where the model has another attention, which does not look at this."""
    settings = model.config.get_text_config()
    if ALL_ATTENTION_FUNCTIONS.get(settings._attn_implementation) is not attention_forward:
        warnings.warn(
            f'configure() has no effect: the model\'s attn_implementation is "{settings._attn_implementation}". '
            'Load it with attn_implementation="sparsebalance"',
            stacklevel=2,
        )
    _configs[config.spec] = config
    setattr(settings, _KEY, config.spec)
    learner = SelectionLearner(config) if config.measures_planes or config.learns_thresholds else None
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _LEARNER, learner)
    return learner


def learner_of(model: Any) -> SelectionLearner | None:
    """What configure() has made for the model."""
    return next((getattr(module, _LEARNER) for module in model.modules() if hasattr(module, _LEARNER)), None)


def install(replace: str = "sparsebalance", config: AttentionConfig | None = None) -> None:
    """Registers attention and mask under a name: `sparsebalance` is there from the import on; "sdpa" is for launchers that
    accept known names only. `config`: of models that configure() has not been called for."""
    if config is not None:
        _default[0] = config
    AttentionInterface.register(replace, attention_forward)
    AttentionMaskInterface.register(replace, flash_attention_mask)


def _config_of(module: Any) -> AttentionConfig:
    spec = getattr(module.config, _KEY, None)
    if spec is None:
        return _default[0]
    if spec not in _configs:  # of a config.json
        _configs[spec] = AttentionConfig(**json.loads(spec))
    return _configs[spec]


# Arguments that change the result and that we do not compute, with the value that changes nothing.
_REFUSED = {"sliding_window": None, "softcap": None, "s_aux": None, "position_bias": None}


def _refuse(module: Any, dropout: float, given: dict[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        if given.get(name) is not harmless:
            raise _core.UserError(
                f'attention "sparsebalance" does not do {name}, which {type(module).__name__} asks for: choose another '
                "attn_implementation, or switch it off in the model's config"
            )
    if dropout > 0:
        raise _core.UserError(f'attention "sparsebalance" has no dropout ({dropout}): set attention_dropout to 0')
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _core.UserError('attention "sparsebalance" is causal only: choose another attn_implementation')


@torch.library.custom_op("sparsebalance::sequences_of_positions", mutates_args=())
def _sequences_of_positions(position_ids: Tensor) -> Tensor:
    """cu_seqlens of positions that restart, of a size that follows from theirs: the rest are empty sequences."""
    tokens = position_ids.numel()
    starts = torch.nonzero(position_ids.reshape(-1) == 0).reshape(-1).to(torch.int32)
    room = tokens // 64 + 64
    if starts.numel() > room:
        raise _core.UserError(f"{starts.numel()} sequences in {tokens} tokens: a compiled model takes {room}; pass cu_seq_lens_q")
    if tokens and (starts.numel() == 0 or int(starts[0]) != 0):
        starts = torch.cat([starts.new_zeros(1), starts])
    result = torch.full((room + 2,), tokens, dtype=torch.int32, device=position_ids.device)
    result[: starts.numel()] = starts
    return result


@_sequences_of_positions.register_fake
def _(position_ids):  # type: ignore[no-untyped-def]
    return position_ids.new_empty((position_ids.numel() // 64 + 66,), dtype=torch.int32)


def _rows(batch: int, tokens: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32) * tokens


def _restarts(position_ids: Tensor) -> Tensor | None:
    """cu_seqlens where positions restart; None where they do not."""
    positions = position_ids.reshape(-1)
    starts = torch.nonzero(positions == 0).reshape(-1).to(torch.int32)
    if starts.numel() <= 1:
        return None
    end = torch.tensor([positions.numel()], dtype=torch.int32)
    starts = starts.cpu()
    head = starts.new_zeros(0 if int(starts[0]) == 0 else 1)
    return torch.cat([head, starts, end])


def _unmasked(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that are no padding, and cu_seqlens of the rows without it."""
    kept = torch.nonzero(mask.reshape(-1)).reshape(-1)
    return kept, torch.nn.functional.pad(mask.sum(1, dtype=torch.int32).cumsum(0), (1, 0))


_restarts_once, _unmasked_once = OnceATensor(_restarts), OnceATensor(_unmasked)


def _packed_positions(position_ids: Tensor) -> Tensor | None:
    if torch.compiler.is_compiling():
        return _sequences_of_positions(position_ids)
    return _restarts_once(position_ids)


def _cached(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, None]:
    """New tokens after cached ones: dense, by torch."""
    if "cache" not in _warned:
        _warned.add("cache")
        warnings.warn('attention "sparsebalance" leaves decoding with a cache to sdpa, which is dense', stacklevel=2)
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + keys - queries
    seen = seen.to(query.device)[None, None]
    if mask is not None:
        seen = seen & mask[:, None, None, -keys:].bool()
    return sdpa_attention_forward(module, query, key, value, seen, scaling=scaling, is_causal=False)


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, **options: Any) -> Tensor:
    config, learner = _config_of(module), getattr(module, _LEARNER, None)
    if learner is not None:
        return learner.attend(q, k, v, cu_seqlens, **options, observe=module.training)
    if config.measures_planes or config.learns_thresholds:
        raise _core.UserError(
            f"attention with pattern {config.pattern} and score {config.score} learns from step to step: "
            "call sparsebalance.transformers.configure(model, config) and, after every step, learn() of what it returns"
        )
    return varlen_attn(q, k, v, cu_seqlens, config=config, **options)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [batch, heads, tokens, d] to output [batch, tokens, heads, d]."""
    _refuse(module, dropout, kwargs)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise _core.UserError(
            f'attention "sparsebalance" takes 2-D masks, not {attention_mask.dim()}-D ones: mark padding, or pack sequences'
        )
    batch, heads, tokens, width = query.shape
    if key.shape[2] != tokens:
        return _cached(module, query, key, value, attention_mask, scaling)
    layer = getattr(module, "layer_idx", None) or 0
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2).reshape(batch * tokens, x.shape[1], width) for x in (query, key, value))

    cu_seqlens, kept = kwargs.get("cu_seq_lens_q"), None
    positions = kwargs.get("position_ids")
    if cu_seqlens is not None and batch != 1:
        raise _core.UserError(f"cu_seq_lens_q with a batch of {batch} rows: packed sequences come as one row")
    if cu_seqlens is None and batch == 1 and positions is not None and positions.dim() == 2:
        cu_seqlens = _packed_positions(positions)
    if cu_seqlens is None and attention_mask is not None:
        kept, cu_seqlens = _unmasked_once(attention_mask)
        q, k, v = q[kept], k[kept], v[kept]
    if cu_seqlens is None:
        cu_seqlens = _rows(batch, tokens)

    budgets = kwargs.get("sb_budgets")
    budgets = on_host(budgets)[layer] if budgets is not None else None
    out = _attend(module, q, k, v, cu_seqlens, budgets=budgets, scale=scaling, layer=layer)
    if kept is not None:
        out = out.new_zeros(batch * tokens, heads, width).index_copy(0, kept, out)
    return out.reshape(batch, tokens, heads, width), None


install()
