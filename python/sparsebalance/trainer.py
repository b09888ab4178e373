"""Balanced steps for transformers.Trainer, and a collator that packs.

    class MyTrainer(BalancedTrainerMixin, Trainer): ...
    MyTrainer(..., planner=sb.Planner(..., dp=world_size, micro_batch_sequences=per_device_train_batch_size),
              data_collator=PackedCollator())
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import TrainerCallback, trainer_pt_utils

from sparsebalance import _core
from sparsebalance.learner import SelectionLearner
from sparsebalance.planner import Planner
from sparsebalance.sampler import BalancedBatchSampler, PlannedDataset, PlannedIndex

__all__ = ["BalancedTrainerMixin", "LearningCallback", "PackedCollator"]


class PackedCollator:
    """Samples with `input_ids` (and `labels`) in one row without padding, told apart by cu_seq_lens_q and position_ids; the
    first token of a sequence is nobody's target. `sb_budgets` of the samples become [layers, sequences]."""

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ids = [torch.as_tensor(sample["input_ids"], dtype=torch.int64) for sample in samples]
        labels = [torch.as_tensor(s.get("labels", i), dtype=torch.int64).clone() for s, i in zip(samples, ids)]
        for own in labels:
            own[:1] = -100
        lengths = torch.tensor([len(own) for own in ids], dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        batch: dict[str, Any] = {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat(labels)[None],
            "position_ids": torch.cat([torch.arange(len(own)) for own in ids])[None],
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": int(lengths.max()),
            "max_length_k": int(lengths.max()),
        }
        if "sb_budgets" in samples[0]:
            batch["sb_budgets"] = torch.from_numpy(np.stack([sample["sb_budgets"] for sample in samples], axis=1))
        return batch


# The only class of batch samplers that Trainer takes. Before transformers 5.17 there is none.
_BatchSampler: Any = getattr(trainer_pt_utils, "BatchRebalanceSampler", object)


class _TrainerSampler(_BatchSampler):
    """Has nothing in common with its base but that Trainer takes it."""

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[PlannedIndex]]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


def _lengths(dataset: Any) -> list[int]:
    """Of the column `length` where there is one, otherwise of the samples."""
    if "length" in getattr(dataset, "column_names", ()):
        return list(dataset["length"])
    return [len(dataset[i]["input_ids"]) for i in range(len(dataset))]


class LearningCallback(TrainerCallback):
    """What `mass` and `score: planes` learn, in a Trainer: after every step, and in its checkpoints.

    Trainer(..., callbacks=[LearningCallback(sbt.configure(model, config))])

    resume_from: the folder that train(resume_from_checkpoint=...) is given, which callbacks are not told; needed where that
    is not in output_dir."""

    FILE = "sparsebalance_selection.pt"

    def __init__(self, learner: SelectionLearner, resume_from: str | os.PathLike[str] | None = None) -> None:
        self.learner, self.resume_from = learner, resume_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        if self.resume_from is not None:
            folder = os.fspath(self.resume_from)
        elif isinstance(args.resume_from_checkpoint, str):
            folder = args.resume_from_checkpoint
        file = os.path.join(folder, self.FILE)
        if not os.path.isfile(file):
            raise _core.UserError(
                f"{file}: there is no such file, which holds what attention had learned. Name the checkpoint's folder, "
                "LearningCallback(learner, resume_from=...), or, where it never had one, begin anew: "
                "torch.save(learner.state_dict(), file)"
            )
        self.learner.load_state_dict(torch.load(file, weights_only=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.learner.learn()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            torch.save(self.learner.state_dict(), os.path.join(folder, self.FILE))


class BalancedTrainerMixin:
    """Put before Trainer; takes `planner`. The Trainer's global batch is what the planner balances."""

    def __init__(self, *args: Any, planner: Planner, **kwargs: Any) -> None:
        if _BatchSampler is object:
            raise _core.UserError(
                "BalancedTrainerMixin needs transformers 5.17 or later, whose Trainer takes batch samplers; this is "
                f"{transformers.__version__}. BalancedBatchSampler works with accelerate and a loop of your own"
            )
        self.planner = planner
        super().__init__(*args, **kwargs)
        settings: Any = self.args  # type: ignore[attr-defined]
        if planner.dp != settings.world_size:
            raise _core.UserError(f"the planner has dp {planner.dp}, and {settings.world_size} processes train")
        if planner.micro_batch_sequences != settings.per_device_train_batch_size:
            raise _core.UserError(
                f"the planner's micro_batch_sequences is {planner.micro_batch_sequences}, per_device_train_batch_size is "
                f"{settings.per_device_train_batch_size}: they must be the same"
            )
        if self.train_dataset is not None:  # a Trainer that evaluates has none
            self.train_dataset = PlannedDataset(self.train_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        """Trainer drops what forward() does not name; budgets reach attention through its **kwargs."""
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns: list[str] = self._signature_columns  # type: ignore[attr-defined]
        if "sb_budgets" not in columns:
            columns.append("sb_budgets")

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        settings: Any = self.args  # type: ignore[attr-defined]
        batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * settings.world_size
        lengths = _lengths(getattr(dataset, "dataset", dataset))
        return _TrainerSampler(
            BalancedBatchSampler(lengths, self.planner, batch, seed=settings.seed, rank=settings.process_index)
        )
