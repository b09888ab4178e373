"""Sparse attention and balanced steps for training long-context language models.

This imports neither torch nor transformers; `sparsebalance.torch` and `sparsebalance.transformers` do.
"""

from sparsebalance._core import AttentionSpec, Layout, LoggedStep, MicroBatch, Operation, Plan, RankPlan, UserError
from sparsebalance._core import __build__, __version__, svg
from sparsebalance.planner import Planner
from sparsebalance.runs import profile, profiles, read_metrics, read_plans, report
from sparsebalance.simulation import lengths, simulate, sweep

__all__ = [
    "AttentionSpec",
    "Layout",
    "LoggedStep",
    "MicroBatch",
    "Operation",
    "Plan",
    "Planner",
    "RankPlan",
    "UserError",
    "__build__",
    "__version__",
    "lengths",
    "profile",
    "profiles",
    "read_metrics",
    "read_plans",
    "report",
    "simulate",
    "svg",
    "sweep",
]
