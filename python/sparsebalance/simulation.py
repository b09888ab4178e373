"""What balancing gains on a machine that need not be there."""

import difflib
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

from sparsebalance import _core
from sparsebalance.planner import planner_options

Lengths = str | os.PathLike[str] | Iterable[int]

_ROW = (
    "policy makespan_ms speedup worst_step_speedup imbalance worker_imbalance lower_bound_share bubble_share mean_coverage"
    " min_coverage worst_loss worst_mean_difference tokens cut_share planner_ms"
).split()


class Rows(list[Any]):
    """Rows of a simulation, with a table of them."""

    def __init__(self, rows: Iterable[Any], columns: dict[str, Any]) -> None:
        super().__init__(rows)
        self._columns = columns

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame({name: [get(row) for row in self] for name, get in self._columns.items()})


def lengths(source: Lengths, max_length: int | None = None) -> list[int]:
    """Sequence lengths: of a named pool (chatqa2-like, longalign-like), a text file with one a line, a token file (its
    prefix, .bin or .idx), or as they are given. Longer ones are cut to `max_length`."""
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        tokens = name.endswith((".bin", ".idx")) or os.path.exists(name + ".idx")
        found = _core.token_file_lengths(name) if tokens else _core.find_lengths(name)
        found = [length for length in found if length > 0]
    else:
        found = [int(length) for length in source]
    return found if max_length is None else [min(length, max_length) for length in found]


def _case(
    *,
    model: str | os.PathLike[str] = "qwen2.5-3b",
    profile: str | os.PathLike[str] = "h200-analytic",
    coverage: str | os.PathLike[str] = "power:0.22",
    lengths_of: Lengths = "chatqa2-like",
    max_length: int | None = None,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
    warmup_depth: int = 1,
    comm: bool = True,
    head: bool = True,
    attention: _core.AttentionSpec | None = None,
    global_batch: int = 16,
    micro_batch_sequences: int | None = None,
    micro_batch_tokens: int | None = None,
    p: float = 0.1,
    chunk: int | str = "auto",
    steps: int = 200,
    seed: int = 1,
    threads: int | None = None,
) -> _core.SimulatedCase:
    if micro_batch_sequences is None and micro_batch_tokens is None:
        micro_batch_sequences = 1
    options = planner_options(
        model, profile, coverage, attention,
        _core.Layout(dp=dp, pp=pp, cp=cp, tp=tp, warmup_depth=warmup_depth, comm=comm, head=head),
        p=p, chunk=chunk, micro_batch_sequences=micro_batch_sequences, micro_batch_tokens=micro_batch_tokens,
        threads=threads or _core.available_cores(),
    )  # fmt: skip
    return _core.SimulatedCase(
        options, lengths=lengths(lengths_of, max_length), global_batch=global_batch, steps=steps, seed=seed
    )


def _refuse_unknown(function: Callable[..., Any], case: dict[str, Any]) -> None:
    """TypeError for a keyword that neither the function itself nor _case() has, in the words of Python."""
    own = [name for name in inspect.signature(function).parameters if name != "case"]
    known = own + [name for name in inspect.signature(_case).parameters if name != "lengths_of"]
    for name in case:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            close.sort(key=lambda other: other[0] != name[0])  # a mistyped word mostly begins as it should
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'; {hint}")


def simulate(lengths: Lengths = "chatqa2-like", *, policies: Iterable[str] = (), **case: Any) -> Rows:
    """Predicted step time, speed-up and coverage of balancing policies, one row each (all of them where none is named).

    Keywords as the options of `sparsebalance simulate`: model, profile, coverage, max_length, dp, pp, cp, tp,
    warmup_depth, comm, head, attention (an AttentionSpec), global_batch, micro_batch_sequences, micro_batch_tokens, p, chunk,
    steps, seed, threads."""
    _refuse_unknown(simulate, case)
    rows = _core.simulate(_case(lengths_of=lengths, **case), list(policies))
    return Rows(rows, {name: (lambda row, name=name: getattr(row, name)) for name in _ROW})


def sweep(
    gpus: int,
    lengths: Lengths = "chatqa2-like",
    *,
    policy: str = "sab+order+chunk+optimal",
    max_cp: int = 8,
    max_tp: int = 8,
    **case: Any,
) -> Rows:
    """One policy on every layout of so many GPUs: time, tokens/s, memory and whether it fits. Keywords as of simulate()."""
    _refuse_unknown(sweep, case)
    rows = _core.sweep(_case(lengths_of=lengths, **case), policy, gpus, max_cp, max_tp)
    columns: dict[str, Any] = {
        name: (lambda row, name=name: getattr(row.layout, name)) for name in ("dp", "pp", "tp", "cp")
    }
    columns |= {name: (lambda row, name=name: getattr(row.simulated, name)) for name in ("makespan_ms", "speedup")}
    columns |= {
        name: (lambda row, name=name: getattr(row, name)) for name in ("tokens_per_second", "memory_bytes", "fits")
    }
    columns["mean_coverage"] = lambda row: row.simulated.mean_coverage
    return Rows(rows, columns)
