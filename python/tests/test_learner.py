"""What is learned from step to step, against an independent account of it and against what it is for."""

import copy
import math
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsebalance as sb  # noqa: E402
from sparsebalance.learner import SelectionLearner  # noqa: E402
from sparsebalance.torch import AttentionConfig, varlen_attn  # noqa: E402

MASS = AttentionConfig(pattern="mass", score="planes", score_channels=8, block=64, query_block=16, budget=320, local_blocks=1)


def operands(length, seed, heads=4, kv_heads=2, width=32):
    """Keys and queries that share a few strong rotary planes, different ones in the two kv heads."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.full((kv_heads, width), 0.2)
    for head in range(kv_heads):
        for plane in (1 + head, 5, 9 + head, 14):
            weight[head, [plane, plane + width // 2]] = 2.0
    q = torch.randn(length, heads, width, generator=generator) * weight.repeat_interleave(heads // kv_heads, 0)
    k = torch.randn(length, kv_heads, width, generator=generator) * weight
    return q, k, torch.randn(length, kv_heads, width, generator=generator)


def followed(errors):
    """Correction after steps with these log(chosen / wanted), by the rule of docs/attention.md written out again."""
    correction, gain, last = 0.0, 1.0, None
    for error in errors:
        error = min(max(error, -1.0), 1.0)
        if last is not None:
            gain = min(max(gain * (0.5 if (error > 0) != (last > 0) else 1.25 if gain < 1 else 2.0), 1 / 256), 4.0)
        correction, last = correction + gain * error, error
    return correction


def test_thresholds_follow_what_was_chosen():
    config = AttentionConfig(pattern="mass", block=64, budget=320, local_blocks=1)
    core = sb._core.SelectionLearner(config.settings)
    cu_seqlens, none = np.array([0, 1000], dtype=np.int32), np.zeros(0, dtype=np.int32)
    steps = [(150, 100), (130, 100), (90, 100), (101, 100), (400, 100)]
    for done in range(len(steps) + 1):
        expected = followed([math.log(chosen / wanted) for chosen, wanted in steps[:done]])
        assert core.thresholds(0, cu_seqlens, none)[0] == pytest.approx(expected, abs=1e-5)
        assert core.thresholds(1, cu_seqlens, none)[0] == 0  # another layer
        if done < len(steps):
            core.observe(0, cu_seqlens, none, np.array([steps[done]], dtype=np.int64))
            core.learn()


def test_planes_are_those_of_the_most_energy():
    learner = SelectionLearner(MASS)
    for step in range(3):
        learner.attend(*operands(900, seed=step), [0, 900])
        learner.learn()
    words = learner._core.planes(0, 4, 2, 32, 32**-0.5)
    for head in range(2):
        strong = sorted(p + half for p in (1 + head, 5, 9 + head, 14) for half in (0, 16))
        assert words[8 * head : 8 * head + 8].tolist() == strong


@pytest.mark.parametrize("width", [16, 17])
def test_heads_with_fewer_channels_than_the_default_use_all_of_them(width):
    chosen = dict(pattern="mass", score="planes", block=64, budget=320, local_blocks=1)
    default, own = (SelectionLearner(AttentionConfig(**chosen, **more)) for more in ({}, {"score_channels": 16}))
    for step in range(2):
        q, k, v = (torch.randn(900, heads, width, generator=torch.Generator().manual_seed(step)) for heads in (4, 2, 2))
        assert torch.equal(default.attend(q, k, v, [0, 900]), own.attend(q, k, v, [0, 900]))
        default.learn()
        own.learn()
    assert default._core.planes(0, 4, 2, width, 0.25).size == own._core.planes(0, 4, 2, width, 0.25).size > 0
    too_many = SelectionLearner(AttentionConfig(**chosen, score_channels=34))
    with pytest.raises(sb.UserError, match="score_channels: 34, but the model's heads have 16 channels"):
        too_many.attend(q, k, v, [0, 900])


def test_running_sums_fade():
    core = sb._core.SelectionLearner(MASS.settings)
    sums = [np.arange(1, 2 + 3 * 64, dtype=np.float64) * scale for scale in (1.0, 0.5, 3.0)]
    expected = np.zeros_like(sums[0])
    for values in sums:
        core.observe_sums(1, values)
        core.learn()
        expected = (expected * 0.95 + values).astype(np.float32).astype(np.float64)
    planes, _ = core.state()
    assert planes[0] == [] and np.allclose(planes[1], expected, rtol=1e-7)


def test_lists_come_to_hold_what_the_budget_says():
    learner = SelectionLearner(MASS)
    shares = []
    for step in range(25):
        learner.attend(*operands(1500, seed=step), [0, 1500])
        chosen, wanted = learner._counts[0][3][0].tolist()
        shares.append(chosen / wanted)
        learner.learn()
    assert abs(sum(shares[-10:]) / 10 - 1) < 0.03, shares


def test_nothing_changes_within_a_step_and_a_checkpoint_is_counted_once():
    learner = SelectionLearner(MASS)
    q, k, v = (x.requires_grad_() for x in operands(900, seed=0))
    attend = lambda q, k, v: learner.attend(q, k, v, [0, 900])  # noqa: E731
    plain = attend(q, k, v)
    again = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    assert torch.equal(plain, again) and len(learner._counts) == 2
    gradients = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (plain, again)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients)) and len(learner._counts) == 2


def test_what_was_learned_is_saved():
    learner, other = SelectionLearner(MASS), SelectionLearner(MASS)
    for step in range(4):
        learner.attend(*operands(900, seed=step), [0, 900], layer=1)
        learner.learn()
    other.load_state_dict(learner.state_dict())
    state, same = learner.state_dict(), other.state_dict()
    assert torch.equal(state["planes"], same["planes"]) and torch.equal(state["thresholds"], same["thresholds"])
    assert len(state["thresholds"]) == 1 and state["planes"].shape == (2, 193)
    q, k, v = operands(900, seed=9)
    assert torch.equal(learner.attend(q, k, v, [0, 900], layer=1), other.attend(q, k, v, [0, 900], layer=1))
    fresh = SelectionLearner(MASS).attend(q, k, v, [0, 900], layer=1)
    assert not torch.equal(fresh, other.attend(q, k, v, [0, 900], layer=1))


def test_short_sequences_run_dense():
    learner = SelectionLearner(MASS)
    q, k, v = operands(200, seed=0)
    out = learner.attend(q, k, v, torch.tensor([0, 120, 200]))
    expected = varlen_attn(q, k, v, [0, 120, 200], config=AttentionConfig(pattern="dense"))
    assert torch.equal(out, expected)
    learner.learn()
    assert learner.state_dict()["thresholds"].shape == (0, 6)


def same(one, other):
    return torch.equal(one["planes"], other["planes"]) and torch.equal(one["thresholds"], other["thresholds"])


def test_a_state_of_another_configuration_is_refused():
    other = SelectionLearner(AttentionConfig(pattern="mass", score="planes", budget=512))
    with pytest.raises(sb.UserError, match="budget 320 instead of 512"):
        other.load_state_dict(SelectionLearner(MASS).state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
def test_copies_know_what_was_learned_and_go_on_alone(copied):
    learner = SelectionLearner(MASS)
    learner.attend(*operands(900, seed=0), [0, 900])
    learner.learn()
    before, other = learner.state_dict(), copied(learner)
    assert same(other.state_dict(), before) and other.config == MASS
    other.attend(*operands(900, seed=1), [0, 900])
    other.learn()
    assert same(learner.state_dict(), before) and not same(other.state_dict(), before)


def test_arguments_may_be_filled_anew_before_the_step_is_learned():
    learners = SelectionLearner(MASS), SelectionLearner(MASS)
    for learner, refills in zip(learners, (False, True)):
        cu_seqlens, budgets = torch.tensor([0, 900], dtype=torch.int32), torch.tensor([320], dtype=torch.int32)
        learner.attend(*operands(900, seed=0), cu_seqlens, budgets=budgets)
        if refills:
            cu_seqlens[1], budgets[0] = 5000, 128
        learner.learn()
    states = [learner.state_dict() for learner in learners]
    assert len(states[0]["thresholds"]) == 1 and same(*states)


def test_a_call_without_tokens_leaves_the_first_look_to_the_next():
    learner, fresh = SelectionLearner(MASS), SelectionLearner(MASS)
    learner.attend(*operands(0, seed=0), [0])
    q, k, v = operands(900, seed=0)
    assert torch.equal(learner.attend(q, k, v, [0, 900]), fresh.attend(q, k, v, [0, 900]))


def rank_that_learns(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    learner = SelectionLearner(MASS)
    for layer in (0, 1):
        learner.attend(*operands(900, seed=rank), [0, 900], layer=layer)
    learner.learn()
    torch.save(learner.state_dict(), f"{folder}/{rank}.pt")
    if rank == 0:  # and the other one has seen nothing
        learner.attend(*operands(900, seed=2), [0, 900])
    try:
        learner.learn()
    except sb.UserError as error:
        torch.save(str(error), f"{folder}/error{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_learn_the_same_and_need_the_same_layers(tmp_path):
    torch.multiprocessing.spawn(rank_that_learns, (str(tmp_path),), nprocs=2)
    alone = SelectionLearner(MASS)
    for layer in (0, 1):
        for seed in (0, 1):
            # As two ranks do: each takes its own first look.
            alone._first, alone._planes = {}, {}
            alone.attend(*operands(900, seed=seed), [0, 900], layer=layer)
    alone.learn()
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert same(*states) and torch.equal(states[0]["thresholds"], alone.state_dict()["thresholds"])
    torch.testing.assert_close(states[0]["planes"], alone.state_dict()["planes"], rtol=1e-6, atol=0)
    for rank in (0, 1):
        assert "rank 1 has run the layers [] in this step, and rank 0 [0]" in torch.load(tmp_path / f"error{rank}.pt")
