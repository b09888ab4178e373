"""Profiles of timed micro-batches: rates are found again, a planner predicts by them, and measuring changes nothing."""

import json

import pytest

import sparsebalance as sb
from sparsebalance import _core

MODEL = "qwen2.5-0.5b"
LAYERS = 24
# Dense up to the budget; longer sequences are judged, every key by planes.
ATTENTION = sb.AttentionSpec(budget=1024, block=64)
FIXED, TOKEN, PAIR, SCORE = 5000.0, 2.0, 0.01, 0.004  # microseconds, the last three for every layer


def work(lengths):
    """Tokens, pairs and scores of a layer."""
    kept = [min(n, ATTENTION.budget) for n in lengths]
    pairs = sum(k * (n - k / 2) for n, k in zip(lengths, kept))
    return sum(lengths), pairs, sum(n * n / 2 for n in lengths if n > ATTENTION.budget)


def forward_us(lengths):
    tokens, pairs, scores = work(lengths)
    return FIXED + LAYERS * (TOKEN * tokens + PAIR * pairs + SCORE * scores)


def backward_us(lengths):
    tokens, pairs, _ = work(lengths)
    return 2 * FIXED + LAYERS * (3 * TOKEN * tokens + 2.5 * PAIR * pairs)


TIMED = [
    (lengths, forward_us(lengths), backward_us(lengths))
    for lengths in ([64], [900], [2000], [6000], [300, 300, 300], [1500, 90], [4000, 4000, 700], [1024] * 4, [20] * 9)
]


def fit(fitted=TIMED, held_out=()):
    return _core.fit_profile(
        model=MODEL, attention=ATTENTION, machine="a machine", date="", fitted=fitted, held_out=list(held_out)
    )


def test_rates_are_found_again_and_plans_predict_by_them(tmp_path):
    (tmp_path / "profile.json").write_text(fit())
    planner = sb.Planner(
        MODEL, profile=tmp_path / "profile.json", dp=2, micro_batch_sequences=2, attention=ATTENTION, tuning="none"
    )
    lengths = [5000, 3000, 200, 100, 1200, 800, 2500, 40]
    for rank in planner.plan(1, lengths).ranks:
        for micro_batch in rank.micro_batches:
            own = [lengths[i] for i in micro_batch.sequences]
            assert micro_batch.forward_us == pytest.approx([forward_us(own)], rel=1e-4)
            assert micro_batch.backward_us == pytest.approx([backward_us(own)], rel=1e-4)


def test_what_is_not_fitted_tells_how_good_the_fit_is():
    twice = [(lengths, 2 * forward, 2 * backward) for lengths, forward, backward in TIMED[:3]]
    error = json.loads(fit(held_out=twice))["held_out_error"]
    assert error["count"] == 3 and error["median"] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("timed", "message"),
    [([], "no micro-batch"), ([([0], 1.0, 1.0)], "0 tokens"), ([([8], 0.0, 1.0)], "nothing can be fitted")],
)
def test_wrong_times_are_named(timed, message):
    with pytest.raises(sb.UserError, match=message):
        fit(timed)


def test_measuring_a_model_changes_nothing_of_it(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import sparsebalance.transformers as sbt
    from sparsebalance.profiling import measure_profile
    from sparsebalance.torch import AttentionConfig

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="sparsebalance",
        )
    )  # fmt: skip
    config = AttentionConfig(pattern="mass", score="planes", score_channels=8, budget=256, block=64)
    learner = sbt.configure(model, config)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    learned = learner.state_dict()
    spec = sb.AttentionSpec(budget=256, block=64)
    random_state = torch.get_rng_state()
    measure_profile(model, spec, [40, 90, 500, 400, 150, 30], tmp_path / "profile.json", sequences=3)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert all(torch.equal(learner.state_dict()[name], learned[name]) for name in ("planes", "thresholds"))
    assert not learner._counts and not learner._sums
    model.config.save_pretrained(tmp_path)
    operations = sb.profile(tmp_path / "profile.json", tmp_path)["operations"]
    assert operations["linear_forward"]["us"][1] > 0 and operations["linear_backward"]["us"][1] > 0
    with pytest.raises(sb.UserError, match="cannot be drawn"):
        measure_profile(model, spec, [40], tmp_path / "none.json", sequences=3)
