"""Batches for a DataLoader as a Planner makes them."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sparsebalance import _core
from sparsebalance.planner import Planner

__all__ = ["BalancedBatchSampler", "PlannedDataset", "PlannedIndex"]


class PlannedIndex(int):
    """An index into a dataset that carries the budgets its sequence was given, one a layer; None: the configured one."""

    budgets: Any

    def __new__(cls, index: int, budgets: Any) -> "PlannedIndex":
        made = super().__new__(cls, index)
        made.budgets = budgets
        return made

    def __reduce__(self) -> Any:  # to the workers of a DataLoader
        return PlannedIndex, (int(self), self.budgets)


class PlannedDataset:
    """A dataset of dictionaries whose samples also hold `sb_budgets`, where the sampler gives some."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[int(index)]
        budgets = getattr(index, "budgets", None)
        return sample if budgets is None else {**sample, "sb_budgets": budgets}


class BalancedBatchSampler:
    """Micro-batches of whole sequences, balanced by a Planner, in an order that ranks take in turns.

    Every optimizer step takes the next `global_batch_size` sequences of a random order (shuffle=False: of the
    dataset's); all ranks draw the same. Batch i is
    for rank i mod dp, which is how accelerate hands them out (DataLoaderConfiguration(even_batches=False)); with `rank` only
    that rank's batches come. A rank has `micro_batches` of them in every step: gradient accumulation. Sequences that do not
    fill a step are left for the next epoch's order.
    """

    drop_last = True

    def __init__(
        self,
        lengths: Sequence[int],
        planner: Planner,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
    ) -> None:
        if planner.micro_batch_sequences is None:
            raise _core.UserError("the planner needs micro_batch_sequences: it fixes how many micro-batches a step has")
        if planner.chunk is not None:
            raise _core.UserError("the planner cuts sequences (chunk), and a DataLoader has whole ones: leave chunk out")
        share = planner.dp * planner.micro_batch_sequences
        if global_batch_size < 1 or global_batch_size % share != 0:
            raise _core.UserError(f"global_batch_size {global_batch_size} is no multiple of dp x micro_batch_sequences = {share}")
        if len(lengths) < global_batch_size:
            raise _core.UserError(f"{len(lengths)} sequences do not fill one step of {global_batch_size}")
        if rank is not None and not 0 <= rank < planner.dp:
            raise _core.UserError(f"rank {rank} is not one of the planner's {planner.dp}")
        self.lengths = [int(length) for length in lengths]
        self.planner, self.global_batch_size, self.seed, self.rank = planner, global_batch_size, seed, rank
        self.shuffle, self.micro_batches = shuffle, global_batch_size // share
        self.epoch, self.step = 0, 0  # the next step of the epoch

    def __len__(self) -> int:
        return self._steps() * self.micro_batches * (self.planner.dp if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[PlannedIndex]]:
        order = list(range(len(self.lengths)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        for step in range(self.step, self._steps()):
            self.step = step + 1
            batch = order[step * self.global_batch_size : (step + 1) * self.global_batch_size]
            ranks = self.micro_batches_of(self.epoch * self._steps() + step + 1, batch)
            for slot in range(self.micro_batches):
                for rank in range(self.planner.dp):
                    if self.rank in (None, rank):
                        yield ranks[rank][slot]
        self.epoch, self.step = self.epoch + 1, 0

    def _steps(self) -> int:
        return len(self.lengths) // self.global_batch_size

    def micro_batches_of(self, step: int, batch: Sequence[int]) -> list[list[list[PlannedIndex]]]:
        """[rank][micro-batch] of a global batch, as many on every rank: a plan may have fewer, larger ones."""
        plan = self.planner.plan(step, [self.lengths[i] for i in batch])
        ranks: list[list[list[PlannedIndex]]] = []
        for rank in plan.ranks:
            ranks.append([])
            for planned in rank.micro_batches:
                budgets = planned.budgets
                columns = [None if budgets is None else np.ascontiguousarray(budgets[:, i]) for i in range(len(planned.sequences))]
                ranks[-1].append([PlannedIndex(batch[j], column) for j, column in zip(planned.sequences, columns)])
        self._even_out(ranks)
        return ranks

    def _even_out(self, ranks: list[list[list[PlannedIndex]]]) -> None:
        for rank in ranks:
            while len(rank) > self.micro_batches:  # the two shortest together
                rank.sort(key=self._tokens, reverse=True)
                last = rank.pop()
                rank[-1] = rank[-1] + last
        for rank in ranks:
            while len(rank) < self.micro_batches:
                fullest = max((m for m in rank if len(m) > 1), key=self._tokens, default=None)
                if fullest is None:  # a sequence of another rank, the shortest that it can spare
                    donor = max((r for r in ranks if sum(map(len, r)) > self.micro_batches), key=lambda r: sum(map(len, r)))
                    source = min((m for m in donor if len(m) > 1), key=lambda m: min(self.lengths[i] for i in m))
                    moved = min(source, key=lambda i: self.lengths[i])
                    source.remove(moved)
                    rank.append([moved])
                    continue
                longest = max(fullest, key=lambda i: self.lengths[i])
                rank[rank.index(fullest)] = [i for i in fullest if i is not longest]
                rank.append([longest])

    def _tokens(self, micro_batch: Sequence[int]) -> int:
        return sum(self.lengths[i] for i in micro_batch)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.step = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step, "seed": self.seed, "planner": self.planner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step, self.seed = state["epoch"], state["step"], state["seed"]
        self.planner.load_state_dict(state["planner"])
