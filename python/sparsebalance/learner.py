"""What `mass` and `score: planes` learn from step to step, as `sparsebalance train` does it.

    learner = SelectionLearner(AttentionConfig(pattern="mass", score="planes", budget=8192))
    out = learner.attend(q, k, v, cu_seqlens, layer=layer)      # in every layer
    ...
    optimizer.step()
    learner.learn()                                             # once a step, on every rank

Within a step nothing changes; learn() sums what all ranks have seen, so that they all go on with the same.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebalance import _core
from sparsebalance.torch import AttentionConfig, Seen, on_host, varlen_attn

__all__ = ["SelectionLearner"]

_FIRST_LOOK = 4096  # tokens of a sequence that a first look takes at most


def _recomputes() -> bool:
    """Within a backward pass: what runs forward there has run before."""
    return torch._C._current_graph_task_id() != -1


def _on_one_device(join: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Layers may be on several."""
    return join([x.to(tensors[0].device) for x in tensors])


def _differences(theirs: str, ours: str) -> str:
    before, now = json.loads(theirs), json.loads(ours)
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)} instead of {now.get(name)}" for name in names)


class SelectionLearner:
    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self._core = _core.SelectionLearner(config.settings)
        self._planes: dict[tuple[Any, ...], Tensor] = {}  # of this step
        self._first: dict[int, np.ndarray[Any, Any]] = {}  # sums of layers that nothing was learned of yet
        self._sums: dict[int, Tensor] = {}
        self._counts: list[tuple[int, Tensor, Tensor, Tensor]] = []

    @torch.compiler.disable
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | Sequence[int],
        *,
        budgets: Tensor | Sequence[int] | None = None,
        scale: float | None = None,
        layer: int = 0,
        observe: bool = True,
    ) -> Tensor:
        """varlen_attn() by what was learned so far. observe: learn from it; what a checkpoint recomputes is left out."""
        lengths, given = (
            on_host(x) if isinstance(x, Tensor) else torch.tensor([] if x is None else x, dtype=torch.int32)
            for x in (cu_seqlens, budgets)
        )
        planes = self._planes_of(q, k, v, lengths, scale, layer) if self.config.measures_planes else None
        thresholds = None
        if self.config.learns_thresholds:
            thresholds = torch.from_numpy(self._core.thresholds(layer, lengths.numpy(), given.numpy()))
        out, seen = varlen_attn(
            q, k, v, lengths, config=self.config, budgets=given if budgets is not None else None, scale=scale, layer=layer,
            planes=planes, thresholds=thresholds, return_seen=True,
        )  # fmt: skip
        if observe and not _recomputes():
            self._observe(layer, lengths, given, seen)
        return out

    def _planes_of(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None, layer: int) -> Tensor:
        shape = (layer, q.shape[1], k.shape[1], q.shape[2], q.shape[2] ** -0.5 if scale is None else float(scale))
        if shape not in self._planes:
            words = self._core.planes(*shape)
            if words.size == 0 and q.shape[0] > 0:
                if layer not in self._first:
                    self._first[layer] = self._look(q, k, v, lengths)
                fresh = _core.SelectionLearner(self.config.settings)
                fresh.observe_sums(layer, self._first[layer])
                fresh.learn()
                words = fresh.planes(*shape)
            if words.size == 0:  # no tokens to look at: others of this step may have some
                return torch.empty(0, dtype=torch.int32)
            self._planes[shape] = torch.from_numpy(words.view(np.int32))
        return self._planes[shape]

    @torch.no_grad()
    def _look(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> "np.ndarray[Any, Any]":
        """Sums of the beginnings of the sequences at hand: what they are judged by until a step has been learned from."""
        ends = [min(a + _FIRST_LOOK, b) for a, b in zip(lengths.tolist(), lengths.tolist()[1:])]
        sizes = [end - begin for begin, end in zip(lengths.tolist(), ends)]
        rows = torch.cat([torch.arange(begin, end) for begin, end in zip(lengths.tolist(), ends)]).to(q.device)
        cu_seqlens = np.cumsum([0, *sizes]).tolist()
        within = [max(size, 1) for size in sizes]  # budgets that cover everything: dense
        _, seen = varlen_attn(
            q[rows], k[rows], v[rows], cu_seqlens, config=self.config, budgets=within, return_seen=True
        )  # fmt: skip
        return seen.sums.cpu().numpy()

    def _observe(self, layer: int, lengths: Tensor, budgets: Tensor, seen: Seen) -> None:
        if seen.sums.numel():
            known = self._sums.get(layer)
            self._sums[layer] = seen.sums if known is None else known.add_(seen.sums.to(known.device))
        if self.config.learns_thresholds:
            # Copies: the caller may fill its tensors anew before learn().
            self._counts.append((layer, lengths.clone(), budgets.clone(), seen.counts))

    def learn(self, group: Any = None) -> None:
        """Ends a step. With torch.distributed every rank of the group calls it, with the same layers."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._counts:
            counts = _on_one_device(torch.cat, [one[3] for one in self._counts]).cpu().numpy()
            at = 0
            for layer, lengths, budgets, own in self._counts:
                self._core.observe(layer, lengths.numpy(), budgets.numpy(), counts[at : at + len(own)])
                at += len(own)
        layers = sorted(self._sums)
        if distributed:
            self._gather(layers, group)
        if layers:
            sums = _on_one_device(torch.stack, [self._sums[layer] for layer in layers])
            if distributed:
                torch.distributed.all_reduce(sums, group=group)
            for layer, values in zip(layers, sums.cpu().numpy()):
                self._core.observe_sums(layer, values)
        self._core.learn()
        self._forget_step()

    def _gather(self, layers: list[int], group: Any) -> None:
        """The masses of all ranks. Ranks that have seen different layers could not add up their sums."""
        seen: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(seen, (layers, self._core.take_masses()), group=group)
        for rank, (others, _) in enumerate(seen):
            if others != seen[0][0]:
                raise _core.UserError(
                    f"learn(): rank {rank} has run the layers {others} in this step, and rank 0 {seen[0][0]}: every rank "
                    "of the group must run the same ones, in training mode; a batch without tokens will do"
                )
        for _, masses in seen:
            self._core.add_masses(masses)

    def _forget_step(self) -> None:
        self._planes, self._first, self._sums, self._counts = {}, {}, {}, []

    def state_dict(self) -> dict[str, Any]:
        """What was learned up to the last learn()."""
        planes, thresholds = self._core.state()
        width = max((len(values) for values in planes), default=0)
        sums = torch.zeros(len(planes), width, dtype=torch.float64)
        for layer, values in enumerate(planes):
            if values:
                sums[layer] = torch.tensor(values, dtype=torch.float64)
        classes = torch.tensor(thresholds, dtype=torch.float64).reshape(-1, 6)
        return {"spec": self.config.spec, "planes": sums, "thresholds": classes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["spec"] != self.config.spec:
            raise _core.UserError(
                f"what was learned is of attention with {_differences(state['spec'], self.config.spec)}: "
                "configure it as it was, or go on with a learner that starts anew"
            )
        planes = [values if values and values[0] > 0 else [] for values in state["planes"].tolist()]
        self._core.set_state(planes, state["thresholds"].tolist())
        self._forget_step()

    def __getstate__(self) -> dict[str, Any]:
        """For copies of a model, and pickles: what state_dict() says, without the step under way."""
        return {"config": self.config, "learned": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]
        self.load_state_dict(state["learned"])
