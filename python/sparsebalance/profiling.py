"""Latencies of a model of transformers on this machine, for a Planner.

    measure_profile(model, attention, lengths, "profile.json")     # attention: the AttentionSpec of the planner
    planner = sb.Planner(path, profile="profile.json", attention=attention, ...)
"""

import datetime
import os
import pathlib
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from sparsebalance import _core
from sparsebalance.trainer import PackedCollator
from sparsebalance.transformers import learner_of

__all__ = ["measure_profile"]

_MICRO_BATCHES, _PASSES = 32, 2
_HELD_OUT = 4  # every fourth micro-batch is not fitted, and tells how good the fit is


def measure_profile(
    model: Any,
    attention: _core.AttentionSpec,
    lengths: Sequence[int],
    path: str | os.PathLike[str],
    *,
    sequences: int = 4,
    seed: int = 0,
) -> None:
    """Times forward and backward of random tokens in packed micro-batches of one to `sequences` of `lengths`, and
    writes a profile. With torch.distributed all ranks measure at the same time, as they will train, and all write the same:
    give each a path of its own, or one that all may replace. `model` is the one to be trained, before it is wrapped;
    its gradients are None afterwards, nothing else changes."""
    micro_batches = _draw(lengths, sequences, random.Random(seed))
    learner = learner_of(model)
    learned = learner.state_dict() if learner is not None else None
    passes = [[_time_passes(model, own) for own in micro_batches] for _ in range(_PASSES)]
    if learner is not None:
        learner.load_state_dict(learned)
    # Other work on the machine only ever lengthens a time.
    shortest = torch.tensor(passes, dtype=torch.float64, device=model.device).amin(0)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(shortest)
        shortest /= torch.distributed.get_world_size()
    timed = [(own, forward, backward) for own, (forward, backward) in zip(micro_batches, shortest.tolist())]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        profile = _core.fit_profile(
            model=folder,
            attention=attention,
            machine=_machine(model),
            date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            fitted=[own for i, own in enumerate(timed) if (i + 1) % _HELD_OUT],
            held_out=timed[_HELD_OUT - 1 :: _HELD_OUT],
        )
    _core.replace_file(pathlib.Path(path), profile)


def _draw(lengths: Sequence[int], sequences: int, generator: random.Random) -> list[list[int]]:
    """The longest comes first, so that memory that does not suffice shows at once, and warms up what comes after it."""
    if sequences < 1 or len(lengths) < sequences:
        raise _core.UserError(f"micro-batches of {sequences} sequences cannot be drawn from {len(lengths)}")
    drawn = [sorted(lengths)[-sequences:]]
    for i in range(_MICRO_BATCHES):
        drawn.append(generator.sample(list(lengths), 1 + i % sequences))
    return [[int(length) for length in own] for own in drawn]


def _machine(model: Any) -> str:
    cuda = model.device.type == "cuda"
    return torch.cuda.get_device_name(model.device) if cuda else f"{platform.node()}, {torch.get_num_threads()} threads"


def _now(device: torch.device) -> float:
    """Seconds. Of processors their own time, which other processes do not lengthen."""
    if device.type == "cpu":
        return time.process_time() / torch.get_num_threads()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _time_passes(model: Any, lengths: Sequence[int]) -> tuple[float, float]:
    """Microseconds of forward with loss, and of backward."""
    generator = torch.Generator().manual_seed(sum(lengths))
    vocabulary = model.config.get_text_config().vocab_size
    samples = [{"input_ids": torch.randint(0, vocabulary, (length,), generator=generator)} for length in lengths]
    batch = PackedCollator()(samples)
    batch = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    begin = _now(model.device)
    loss = model(**batch, use_cache=False).loss
    between = _now(model.device)
    loss.backward()
    end = _now(model.device)
    model.zero_grad(set_to_none=True)
    return 1e6 * (between - begin), 1e6 * (end - between)
