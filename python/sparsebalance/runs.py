"""The files of a training run, and profiles."""

import json
import os
import pathlib
from typing import Any

from sparsebalance import _core

Path = str | os.PathLike[str]


class Metrics(dict[str, dict[int, float]]):
    """metrics.jsonl as {name: {step: value}}."""

    skipped: int = 0

    def to_pandas(self) -> Any:
        """One row a step."""
        import pandas

        return pandas.DataFrame({name: pandas.Series(values) for name, values in self.items()}).rename_axis("step")


class Plans(dict[int, _core.LoggedStep]):
    """plan.jsonl as {step: LoggedStep}."""

    damage: str = ""

    def to_pandas(self) -> Any:
        """One row a micro-batch, with what was predicted and measured of it."""
        import pandas

        return pandas.DataFrame([row for step in self.values() for row in _rows(step)])


def _rows(step: _core.LoggedStep) -> list[dict[str, Any]]:
    rows = []
    for r, rank in enumerate(step.plan.ranks):
        measured = step.measured_us(r) if step.measured_step_us is not None else None
        for i, micro_batch in enumerate(rank.micro_batches):
            row: dict[str, Any] = {"step": step.plan.step, "rank": r, "micro_batch": i, "tokens": micro_batch.tokens}
            row["sequences"] = len(micro_batch.sequences)
            row["predicted_forward_us"] = sum(micro_batch.forward_us)
            row["predicted_backward_us"] = sum(micro_batch.backward_us)
            if measured is not None:
                row["measured_forward_us"] = sum(forward for forward, _ in measured[i])
                row["measured_backward_us"] = sum(backward for _, backward in measured[i])
            if micro_batch.budgets is not None:
                row["mean_budget"] = float(micro_batch.budgets.mean())
            rows.append(row)
    return rows


def _file_of(run: Path, name: str) -> pathlib.Path:
    path = pathlib.Path(run)
    return path / name if path.is_dir() else path


def read_metrics(run: Path) -> Metrics:
    """The metrics of a run: its directory, or the file."""
    read = _core.read_metrics(_file_of(run, "metrics.jsonl"))
    metrics = Metrics(read.series)
    metrics.skipped = read.skipped
    return metrics


def read_plans(run: Path) -> Plans:
    """The plans of a run: its directory, or the file. `damage` says where the useful part of the file ends, and why."""
    file = _file_of(run, "plan.jsonl")
    if not file.exists():
        raise _core.UserError(
            f"{file}: there is no such file; a run has one when it is balanced (`balance` in its run.yaml)"
        )
    read = _core.read_plan_log(file)
    plans = Plans(read.steps)
    plans.damage = read.damage
    return plans


def report(run: Path, out: Path | None = None, *, step: int = 0) -> str:
    """One HTML page about a run; also written to `out` where that is given. `step`: whose schedule is drawn, 0: a
    typical one."""
    html = _core.report_html(pathlib.Path(run), step)
    if out is not None:
        _core.replace_file(pathlib.Path(out), html)
    return html


def profiles() -> list[str]:
    """The profiles that are built in."""
    return _core.profile_names()


def profile(name_or_path: Path, model: Path = "qwen2.5-3b") -> dict[str, Any]:
    """Latencies of a machine for a model: a built-in one or a file of `sparsebalance profile`, checked."""
    return json.loads(_core.profile_json(os.fspath(name_or_path), os.fspath(model)))
