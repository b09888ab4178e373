"""Batches as a planner makes them: every sequence once an epoch, as many batches on every rank."""

import pickle

import numpy as np
import pytest

import sparsebalance as sb
from sparsebalance.sampler import BalancedBatchSampler, PlannedDataset, PlannedIndex

LENGTHS = [int(n) for n in np.random.default_rng(0).lognormal(8, 1.5, 200).clip(16, 60000)]


def make(lengths=LENGTHS, batch=16, rank=None, planner=(), **options):
    planner = {"dp": 2, "micro_batch_sequences": 2, **dict(planner)}
    return BalancedBatchSampler(lengths, sb.Planner("qwen2.5-0.5b", **planner), batch, rank=rank, **options)


def test_an_epoch_has_every_sequence_of_its_steps_once():
    sampler = make()
    batches = list(sampler)
    assert len(batches) == len(sampler) == 12 * 4 * 2
    seen = [int(i) for batch in batches for i in batch]
    assert len(seen) == len(set(seen)) == 192
    assert all(batch for batch in batches)
    second = list(sampler)  # another order
    assert [list(map(int, b)) for b in second] != [list(map(int, b)) for b in batches] and sampler.epoch == 2


def test_ranks_take_turns():
    every = list(make())
    for rank in (0, 1):
        assert list(make(rank=rank)) == every[rank::2]


@pytest.mark.parametrize("lengths", [[100000] + [10] * 15, [5] * 16, [60000] * 8 + [1] * 8])
def test_as_many_batches_on_every_rank_whatever_the_lengths(lengths):
    batches = list(make(lengths, planner={"micro_batch_sequences": 1}))
    assert len(batches) == 16 and sorted(int(i) for b in batches for i in b) == list(range(16))


def test_steps_are_better_balanced_than_in_the_order_they_come():
    sampler = make()
    mine = other = 0
    order = list(range(len(LENGTHS)))
    for step in range(12):
        batch = order[step * 16 : step * 16 + 16]
        cost = lambda rank: sum(LENGTHS[i] + LENGTHS[i] * min(8192, LENGTHS[i]) / 8192 for i in rank)  # noqa: E731
        ranks = [[i for m in rank for i in m] for rank in sampler.micro_batches_of(step, batch)]
        mine += max(map(cost, ranks))
        other += max(cost(batch[:8]), cost(batch[8:]))
    assert mine < 0.95 * other


def test_budgets_travel_with_the_index():
    batch = next(iter(make(planner={"tuning": "optimal"})))
    index = pickle.loads(pickle.dumps(batch[0]))
    assert isinstance(index, PlannedIndex) and index == batch[0] and index.budgets.shape == (24,)
    sample = PlannedDataset([{"input_ids": [i]} for i in range(200)])[index]
    assert sample["input_ids"] == [int(index)] and np.array_equal(sample["sb_budgets"], index.budgets)


def test_a_restored_sampler_goes_on_where_the_other_was():
    sampler = make()
    batches = list(make())
    iterator = iter(sampler)
    for _ in range(3 * 8):
        next(iterator)
    restored = make(seed=5)
    restored.load_state_dict(sampler.state_dict())
    assert list(restored) == batches[3 * 8 :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 15}, "no multiple"),
        ({"lengths": [5] * 3}, "do not fill"),
        ({"rank": 2}, "rank 2"),
        ({"planner": {"micro_batch_sequences": None, "micro_batch_tokens": 70000}}, "micro_batch_sequences"),
        ({"planner": {"chunk": "auto"}}, "chunk"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(sb.UserError, match=message):
        make(**arguments)
