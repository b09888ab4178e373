"""Which sequences of a step go together, on which rank, in which order, at which budgets."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from sparsebalance import _core

# Of one micro-batch: (forward, backward) in milliseconds on every pipeline stage.
StageTimes = Sequence[tuple[float, float]]


def chunk_tokens(chunk: int | str | None) -> int:
    """Most tokens of a piece as the C++ side has it: 0 leaves sequences whole, -1 takes what is fastest."""
    if chunk is None:
        return 0
    if chunk == "auto":
        return -1
    if not isinstance(chunk, int) or chunk < 0:
        raise _core.UserError(f'chunk: {chunk!r} is neither None, "auto" nor a number of tokens')
    return chunk


def planner_options(
    model: str | os.PathLike[str],
    profile: str | os.PathLike[str],
    coverage: str | os.PathLike[str] | None,
    attention: _core.AttentionSpec | None,
    layout: _core.Layout,
    *,
    chunk: int | str | None,
    micro_batch_sequences: int | None,
    micro_batch_tokens: int | None,
    **same: Any,
) -> _core.PlannerOptions:
    """What a planner and a simulation have in common; None in Python's words. same: as _core has them."""
    return _core.PlannerOptions(
        model=os.fspath(model),
        profile=os.fspath(profile),
        coverage=os.fspath(coverage) if coverage is not None else "",
        attention=attention if attention is not None else _core.AttentionSpec(),
        layout=layout,
        chunk=chunk_tokens(chunk),
        micro_batch_sequences=micro_batch_sequences or 0,
        micro_batch_tokens=micro_batch_tokens or 0,
        **same,
    )


class Planner:
    """Plans optimizer steps from the lengths of their sequences.

    `plan(step, lengths)` is a pure function of its arguments and of `state_dict()`: every rank that calls it with the same
    gets the same plan, and nobody has to send it. `observe()` corrects the predicted latencies by measured ones; where
    several ranks plan, all must observe the same.

    model: a name (qwen2.5-3b), a config.json or the directory that holds one.
    profile: latencies: h200, h200-analytic (and h100-, a100-, h20-), or a file of `sparsebalance profile`.
    coverage: None (curves as training assumes them before it has measured any), power:GAMMA, layered, or a coverage.json.
    batching: in_order or sab; ordering: of micro-batches. Neither changes the result.
    tuning of budgets, which does: none (the budget of `attention` everywhere), anchor (with anchor: mean, min or max) or optimal
        (p: the share of its coverage that a sequence may lose in a layer; target: None for equal coverage, or 0,
        fastest, to 1).
    micro_batch_sequences fixes the number of micro-batches, micro_batch_tokens caps their size; one is needed.
    chunk: "auto" or the most tokens of a piece, for sequences that are cut into pieces.
    precision: bfloat16 or float32, of what moves between ranks.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        profile: str | os.PathLike[str] = "h200-analytic",
        dp: int = 1,
        pp: int = 1,
        cp: int = 1,
        tp: int = 1,
        attention: _core.AttentionSpec | None = None,
        coverage: str | os.PathLike[str] | None = None,
        batching: str = "sab",
        ordering: bool = True,
        tuning: str = "none",
        anchor: str = "mean",
        p: float = 0.1,
        target: float | None = None,
        chunk: int | str | None = None,
        micro_batch_sequences: int | None = None,
        micro_batch_tokens: int | None = None,
        max_sequences: int | None = None,
        warmup_depth: int = 1,
        comm: bool = True,
        head: bool = True,
        precision: str = "bfloat16",
        threads: int = 1,
    ) -> None:
        self.dp, self.pp, self.cp, self.tp = dp, pp, cp, tp
        self.micro_batch_sequences, self.chunk = micro_batch_sequences, chunk
        self.attention = attention if attention is not None else _core.AttentionSpec()
        if target is not None and not 0 <= target <= 1:
            raise _core.UserError(f"target must be None (equal coverage) or a number from 0 to 1, got {target}")
        if precision not in ("bfloat16", "float32"):
            raise _core.UserError(f"precision must be bfloat16 or float32, got {precision}")
        self._planner = _core.Planner(
            planner_options(
                model, profile, coverage, self.attention,
                _core.Layout(
                    dp=dp, pp=pp, cp=cp, tp=tp, warmup_depth=warmup_depth, comm=comm, head=head,
                    element_bytes=2 if precision == "bfloat16" else 4,
                ),
                p=p, chunk=chunk, micro_batch_sequences=micro_batch_sequences, micro_batch_tokens=micro_batch_tokens,
                threads=threads, batching=batching, ordering=ordering, tuning=tuning, anchor=anchor,
                target=-1.0 if target is None else target, max_sequences=max_sequences or 0,
            )
        )  # fmt: skip

    @property
    def layers(self) -> int:
        return self._planner.layers

    @property
    def first_layer(self) -> list[int]:
        """Of every pipeline stage, and one past the last."""
        return self._planner.first_layer

    def plan(self, step: int, lengths: Iterable[int]) -> _core.Plan:
        """The plan of a global batch; its sequences are positions in `lengths`."""
        return self._planner.plan(int(step), [int(length) for length in lengths])

    def observe(
        self, plan: _core.Plan, lengths: Iterable[int], times: Sequence[Sequence[StageTimes]]
    ) -> None:
        """Takes in how long a plan's micro-batches took: times[rank][micro_batch][stage] = (forward ms, backward ms)."""
        self._planner.observe(plan, [int(length) for length in lengths], times)

    def state_dict(self) -> dict[str, Any]:
        """What later plans depend on besides step and lengths."""
        return {"balance": self._planner.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._planner.restore(state["balance"])
