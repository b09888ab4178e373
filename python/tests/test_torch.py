"""The operator against torch's own attention with the same mask, and as torch's machinery uses it."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sparsebalance as sb  # noqa: E402
import sparsebalance.torch as sbt  # noqa: E402
from sparsebalance.torch import AttentionConfig, OnceATensor, chosen_lists, varlen_attn  # noqa: E402

DENSE = AttentionConfig(pattern="dense")
SMALL = dict(block=64, query_block=16, budget=320, local_blocks=1)
FORWARD = torch.ops.sparsebalance.flash_attn_varlen_fwd
PATTERNS = [
    AttentionConfig(pattern="topk", **SMALL),
    AttentionConfig(pattern="topk", score="mean", score_tokens=32, **SMALL),
    AttentionConfig(pattern="topp", coverage=0.7, **SMALL),
    AttentionConfig(pattern="mass", **SMALL),
    AttentionConfig(pattern="window", **SMALL),
]


def packed(lengths, heads=4, kv_heads=2, width=32, seed=0):
    torch.manual_seed(seed)
    tokens = sum(lengths)
    q = torch.randn(tokens, heads, width, requires_grad=True)
    k, v = (torch.randn(tokens, kv_heads, width, requires_grad=True) for _ in range(2))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    return q, k, v, cu_seqlens


def listed(lists, cu_seqlens, config, kv_heads):
    """The mask [kv_heads, tokens, tokens] of lists as the operator returns them: an independent reading of them."""
    tokens = int(cu_seqlens[-1])
    mask = torch.zeros(kv_heads, tokens, tokens, dtype=torch.bool)
    width, row = tokens // config.block + 1, 0
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        length = end - begin
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        if length <= config.budget:
            mask[:, begin:end, begin:end] = causal
            continue
        for head in range(kv_heads):
            own = torch.zeros(length, length, dtype=torch.bool)
            for tile in range(-(-length // config.query_block)):
                for block, first in enumerate(lists[row * width : (row + 1) * width].tolist()):
                    if first != 255:
                        query = tile * config.query_block
                        own[query + first : query + config.query_block, block * config.block : (block + 1) * config.block] = True
                row += 1
            mask[head, begin:end, begin:end] = own & causal
    return mask


def reference(q, k, v, mask):
    heads = [x.transpose(0, 1) for x in (q, k, v)]
    mask = mask.repeat_interleave(q.shape[1] // k.shape[1], 0)
    return scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def gradients(out, inputs):
    torch.manual_seed(1)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape))


@pytest.mark.parametrize("lengths", [[1], [130], [1, 64, 65, 200], [3, 0, 5], [128, 128]])
def test_dense_equals_sdpa(lengths):
    q, k, v, cu_seqlens = packed(lengths)
    mask = listed(torch.zeros(0), cu_seqlens, AttentionConfig(pattern="dense", budget=10**6), 2)
    out, expected = varlen_attn(q, k, v, cu_seqlens, config=DENSE), reference(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    for own, other in zip(gradients(out, (q, k, v)), gradients(expected, (q, k, v))):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", PATTERNS, ids=lambda config: f"{config.pattern}-{config.score}")
@pytest.mark.parametrize("lengths", [[1000], [100, 700, 643]])
def test_sparse_equals_sdpa_over_the_listed_pairs(config, lengths):
    q, k, v, cu_seqlens = packed(lengths)
    mask = listed(chosen_lists(q, k, v, cu_seqlens, config=config).reshape(-1), cu_seqlens, config, 2)
    causal = sum(length * (length + 1) // 2 for length in lengths) * 2
    assert 0 < int(mask.sum()) < 0.9 * causal and bool(mask.diagonal(dim1=1, dim2=2).all())
    out, expected = varlen_attn(q, k, v, cu_seqlens, config=config), reference(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    for own, other in zip(gradients(out, (q, k, v)), gradients(expected, (q, k, v))):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-5)


def test_a_sequence_gets_the_same_alone_and_packed():
    config = PATTERNS[0]
    q, k, v, cu_seqlens = packed([300, 900])
    together = varlen_attn(q, k, v, cu_seqlens, config=config)
    alone = varlen_attn(q[300:], k[300:], v[300:], torch.tensor([0, 900], dtype=torch.int32), config=config)
    assert torch.equal(together[300:], alone)


def test_budgets_of_every_sequence_and_dense_layers():
    q, k, v, cu_seqlens = packed([900, 900])
    dense = varlen_attn(q, k, v, cu_seqlens, config=DENSE)
    config = AttentionConfig(**SMALL, dense_layers=(1,))
    out = varlen_attn(q, k, v, cu_seqlens, config=config, budgets=torch.tensor([900, 384]))
    assert torch.equal(out[:900], dense[:900]) and not torch.allclose(out[900:], dense[900:], atol=1e-3)
    assert torch.equal(varlen_attn(q, k, v, cu_seqlens, config=config, layer=1), dense)


def test_what_mass_and_planes_go_by_are_inputs_and_outputs():
    config = AttentionConfig(pattern="mass", score="planes", score_channels=8, **SMALL)
    q, k, v, cu_seqlens = packed([1000])
    with pytest.raises(sb.UserError, match="planes"):
        varlen_attn(q, k, v, cu_seqlens, config=config)
    # Within its budget a sequence runs dense, and is measured all the same.
    _, seen = varlen_attn(q, k, v, cu_seqlens, config=config, budgets=[1000], return_seen=True)
    counts, sums = seen.counts, seen.sums
    assert sums[0] == 63 and counts.tolist() == [[0, 0]]
    torch.testing.assert_close(sums[1 + 64 : 1 + 2 * 64].view(2, 32), k[::16].double().sum(0), rtol=1e-5, atol=1e-5)
    core = sb._core.SelectionLearner(config.settings)
    core.observe_sums(0, sums.numpy())
    core.learn()
    planes = torch.from_numpy(core.planes(0, 4, 2, 32, 32**-0.5).view("int32"))
    seen = lambda **more: varlen_attn(q, k, v, cu_seqlens, config=config, planes=planes, return_seen=True, **more)[1]  # noqa: E731
    counts, fewer = seen().counts, seen(thresholds=torch.tensor([0.1])).counts
    assert counts[0, 1] == fewer[0, 1] > 0 and fewer[0, 0] < counts[0, 0]
    with pytest.raises(sb.UserError, match="not the planes"):
        varlen_attn(q, k, v, cu_seqlens, config=config, planes=planes + 32)


def test_checkpointing_changes_no_bit():
    config = PATTERNS[0]
    q, k, v, cu_seqlens = packed([700, 400])
    attend = lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, config=config)  # noqa: E731
    plain, again = attend(q, k, v), checkpoint(attend, q, k, v, use_reentrant=False)
    assert torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain, (q, k, v)), gradients(again, (q, k, v))))


def test_modes_of_torch_see_the_operator():
    """Selective checkpointing and others that go by operators' names; without them the dispatcher is left out."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v, cu_seqlens = packed([700])
    expected = varlen_attn(q, k, v, cu_seqlens, config=PATTERNS[0])
    with Watch():
        out = varlen_attn(q, k, v, cu_seqlens, config=PATTERNS[0])
        found = gradients(out, (q, k, v))
    assert any("flash_attn_varlen_fwd" in name for name in seen) and any("flash_attn_varlen_bwd" in name for name in seen)
    assert torch.equal(out, expected) and all(torch.equal(a, b) for a, b in zip(found, gradients(expected, (q, k, v))))


@pytest.mark.parametrize("config", [DENSE, PATTERNS[0]], ids=["dense", "topk"])
def test_opcheck(config):
    q, k, v, cu_seqlens = packed([400, 33])
    none = torch.empty(0, dtype=torch.int32)
    torch.library.opcheck(FORWARD, (q, k, v, cu_seqlens, none, none, none.float(), config.spec, 0.2, 0))


def test_compiles_as_one_graph_for_any_lengths():
    config = PATTERNS[0]
    attend = torch.compile(
        lambda q, k, v, cu: varlen_attn(2 * q, k, v, cu, config=config) + 1, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for lengths in ([700, 400], [900]):
        q, k, v, cu_seqlens = packed(lengths)
        out, expected = attend(q, k, v, cu_seqlens), varlen_attn(2 * q, k, v, cu_seqlens, config=config) + 1
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients(out, (q, k, v)), gradients(expected, (q, k, v))))


def test_other_types_are_computed_in_fp32():
    q, k, v, cu_seqlens = packed([200])
    q, k, v = (x.detach().bfloat16() for x in (q, k, v))
    out = varlen_attn(q, k, v, cu_seqlens, config=DENSE)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, varlen_attn(q.float(), k.float(), v.float(), cu_seqlens, config=DENSE).bfloat16())


def test_no_tokens():
    q, k, v, cu_seqlens = packed([0])
    assert varlen_attn(q, k, v, cu_seqlens, config=DENSE).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens=torch.tensor([0, 50], dtype=torch.int32)), "rise from 0 to the 100 tokens"),
        (dict(cu_seqlens=torch.tensor([0, 120, 100], dtype=torch.int32)), "rise from 0"),
        (dict(budgets=torch.tensor([1, 2])), "2 budgets for 1"),
        (dict(budgets=torch.tensor([0])), "budget of 0"),
        (dict(k=torch.zeros(100, 3, 32), v=torch.zeros(100, 3, 32)), "multiple of 3 kv heads"),
        (dict(q=torch.zeros(100, 128)), "q has the shape"),
        (dict(v=torch.zeros(90, 2, 32)), "shapes"),
        (dict(q=torch.zeros(100, 4, 32, dtype=torch.float64)), "float64"),
        (dict(q=torch.zeros(100, 4, 32, device="meta")), "meta"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    q, k, v, cu_seqlens = packed([100])
    arguments = dict(q=q, k=k, v=v, cu_seqlens=cu_seqlens, config=DENSE) | change
    with pytest.raises(sb.UserError, match=message):
        varlen_attn(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "best"}, "best"),
        ({"block": 100}, "block"),
        ({"pattern": "vertical_slash"}, "shapes"),
        ({"budget": -1}, "budget: -1"),
        ({"sink_blocks": -1}, "sink_blocks: -1"),
        ({"coverage": 1.5}, "coverage: 1.5"),
        ({"dense_below": -2}, "dense_below: -2"),
        ({"dense_layers": (-1,)}, "dense_layers: there is no layer -1"),
        ({"largest_budget": -1}, "largest_budget: -1"),
    ],
)
def test_wrong_configurations_are_named(change, message):
    with pytest.raises(sb.UserError, match=message):
        AttentionConfig(**{"selection": "lookahead", **change})


def test_a_function_of_a_tensor_is_computed_once_until_it_changes():
    calls = []
    once = OnceATensor(lambda x: calls.append(1) or x.tolist())
    x = torch.tensor([1, 2])
    assert once(x) == once(x) == [1, 2] and len(calls) == 1
    x[0] = 5
    assert once(x) == [5, 2] and len(calls) == 2
    del x
    assert not once._known
    with torch.inference_mode():
        y = torch.tensor([1, 2])
        assert once(y) == [1, 2]
        y[0] = 5
        assert once(y) == [5, 2] and not once._known


def test_the_capture_of_a_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, k, v, cu_seqlens = packed([100])
    varlen_attn(q, k, v, cu_seqlens, config=DENSE)  # on the CPU nobody asks
    with pytest.raises(sb.UserError, match="CUDA graph"):
        sbt._cuda_attention_for(DENSE.spec, q)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_usable_gpu_the_message_says_so():
    with pytest.raises(sb.UserError, match="no GPU that this build of sparsebalance can use"):
        sb._core.PackedCudaAttention(DENSE.settings, 0, 0, deterministic=False, portable=False)
