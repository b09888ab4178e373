"""The operator on a GPU: against torch's attention over the same pairs, against the CPU's choices, and as torch uses it."""

import pytest

torch = pytest.importorskip("torch")

import sparsebalance as sb  # noqa: E402
import sparsebalance.torch as sbt  # noqa: E402
from sparsebalance.learner import SelectionLearner  # noqa: E402
from sparsebalance.torch import AttentionConfig, chosen_lists, varlen_attn  # noqa: E402
from test_torch import FORWARD, gradients, listed, packed, reference  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif("with CUDA" not in sb._core.__build__, reason="a build without CUDA"),
]

DENSE = AttentionConfig(pattern="dense")
SMALL = dict(block=64, query_block=16, budget=320, local_blocks=1)
PATTERNS = [
    AttentionConfig(pattern="topk", **SMALL),
    AttentionConfig(pattern="topk", budget=384, score="mean", score_tokens=32),
    AttentionConfig(pattern="topp", coverage=0.7, **SMALL),
    AttentionConfig(pattern="mass", **SMALL),
    AttentionConfig(pattern="mass", selection="lookahead", **SMALL),
    AttentionConfig(pattern="window", **SMALL),
]
LEARNING = AttentionConfig(pattern="mass", score="planes", score_channels=16, budget=512)


@pytest.fixture(params=[False, True], ids=["fastest", "portable"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(sbt, "portable_kernels", request.param)


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def on_gpu(lengths, width=64, dtype=torch.bfloat16, **shape):
    q, k, v, cu_seqlens = packed(lengths, width=width, **shape)
    q, k, v = (x.detach().to("cuda", dtype).requires_grad_() for x in (q, k, v))
    return q, k, v, cu_seqlens


def mask_of(q, k, v, cu_seqlens, config, **options):
    if config.pattern == "dense":
        lists, config = torch.zeros(0), AttentionConfig(pattern="dense", budget=10**6)
    else:
        lists = chosen_lists(q, k, v, cu_seqlens, config=config, **options).reshape(-1)
    return listed(lists, cu_seqlens, config, k.shape[1]).cuda()


def assert_close(own, expected, dtype):
    """Within what rounding inputs, probabilities and results to the type leaves, against the largest value."""
    own, expected = own.detach(), expected.detach()
    bound = (0.02 if dtype == torch.bfloat16 else 2e-5) * max(1.0, float(expected.abs().max()))
    assert float((own.float() - expected).abs().max()) < bound


def assert_equals_reference(q, k, v, cu_seqlens, config, **options):
    mask = mask_of(q, k, v, cu_seqlens, config, **options)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    out, expected = varlen_attn(q, k, v, cu_seqlens, config=config, **options), reference(*exact, mask)
    assert out.dtype == q.dtype
    assert_close(out, expected, q.dtype)
    torch.manual_seed(1)
    dout = torch.randn_like(out)
    for own, other in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, exact, dout.float())):
        assert_close(own, other, q.dtype)
    return mask


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("lengths", [[1], [130], [1, 64, 65, 200], [3, 0, 5], [128, 128]])
def test_dense_equals_sdpa(kernels, lengths, width):
    assert_equals_reference(*on_gpu(lengths, width=width), DENSE)


def test_dense_in_fp32_equals_sdpa():
    assert_equals_reference(*on_gpu([1, 64, 65, 200], width=80, dtype=torch.float32), DENSE)


@pytest.mark.parametrize("config", PATTERNS, ids=lambda config: f"{config.pattern}-{config.score}-{config.selection}")
@pytest.mark.parametrize("lengths", [[1000], [100, 1400, 0, 1301]])
def test_sparse_equals_sdpa_over_the_listed_pairs(kernels, config, lengths):
    q, k, v, cu_seqlens = on_gpu(lengths, heads=6)
    mask = assert_equals_reference(q, k, v, cu_seqlens, config)
    causal = sum(length * (length + 1) // 2 for length in lengths) * 2
    assert 0 < int(mask.sum()) < 0.95 * causal and bool(mask.diagonal(dim1=1, dim2=2).all())


@pytest.mark.parametrize("config", PATTERNS, ids=lambda config: f"{config.pattern}-{config.score}-{config.selection}")
def test_chooses_what_the_cpu_chooses(kernels, config):
    """But for blocks whose scores differ by less than their 16 bits tell."""
    q, k, v, cu_seqlens = on_gpu([1500, 300, 900])
    own = chosen_lists(q, k, v, cu_seqlens, config=config) != 255
    other = chosen_lists(q.cpu(), k.cpu(), v.cpu(), cu_seqlens, config=config) != 255
    assert own.shape == other.shape and int(other.sum()) > 0
    assert int((own != other).sum()) <= 0.02 * int(other.sum())
    if config.pattern == "window":
        assert torch.equal(own, other)


def test_budgets_dense_layers_and_what_the_lists_have_room_for():
    q, k, v, cu_seqlens = on_gpu([900, 900])
    dense = varlen_attn(q, k, v, cu_seqlens, config=DENSE)
    config = AttentionConfig(**SMALL, dense_layers=(1,))
    out = varlen_attn(q, k, v, cu_seqlens.cuda(), config=config, budgets=torch.tensor([900, 384]).cuda())
    assert float((out - dense)[:900].detach().abs().max()) < 0.03 < float((out - dense)[900:].detach().abs().max())
    assert torch.equal(varlen_attn(q, k, v, cu_seqlens, config=config, layer=1), dense)
    narrow = AttentionConfig(block=64, query_block=16, budget=64, local_blocks=1)
    q, k, v, cu_seqlens = on_gpu([6000])
    with pytest.raises(sb.UserError, match="largest_budget"):
        varlen_attn(q, k, v, cu_seqlens, config=narrow, budgets=[3000])
    wider = AttentionConfig(block=64, query_block=16, budget=64, local_blocks=1, largest_budget=3000)
    varlen_attn(q, k, v, cu_seqlens, config=wider, budgets=[3000])


def test_what_is_learned_is_what_the_cpu_learns():
    here, there = SelectionLearner(LEARNING), SelectionLearner(LEARNING)
    for step in range(3):
        q, k, v, cu_seqlens = (x.detach() for x in on_gpu([1500, 300, 900], seed=step))
        out = here.attend(q, k, v, cu_seqlens)
        expected = there.attend(q.cpu(), k.cpu(), v.cpu(), cu_seqlens)
        assert float((out.cpu().float() - expected.float()).abs().mean()) < 0.02
        torch.testing.assert_close(here._sums[0].cpu(), there._sums[0], rtol=1e-5, atol=1e-3)
        own, other = here._counts[0][3].cpu(), there._counts[0][3]
        assert torch.equal(own[:, 1], other[:, 1]) and other[0, 1] > 0 and own[1].tolist() == [0, 0]
        torch.testing.assert_close(own.double(), other.double(), rtol=0.05, atol=0)
        here.learn()
        there.load_state_dict(here.state_dict())


def test_learned_selection_equals_sdpa_over_the_listed_pairs(kernels):
    learner = SelectionLearner(LEARNING)
    q, k, v, cu_seqlens = on_gpu([1500, 900])
    learner.attend(q, k, v, cu_seqlens)
    learner.learn()
    planes = learner._planes_of(q, k, v, cu_seqlens, None, 0)
    assert_equals_reference(q, k, v, cu_seqlens, LEARNING, planes=planes, thresholds=torch.tensor([0.1, 0.2]))


def test_checkpointing_changes_no_bit(deterministic):
    q, k, v, cu_seqlens = on_gpu([700, 400], width=128)
    attend = lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, config=PATTERNS[0])  # noqa: E731
    plain, again = attend(q, k, v), torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    assert torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain, (q, k, v)), gradients(again, (q, k, v))))


def test_another_stream(deterministic):
    q, k, v, cu_seqlens = on_gpu([2000, 1500], width=128)
    expected = varlen_attn(q, k, v, cu_seqlens, config=PATTERNS[0])
    wanted = gradients(expected, (q, k, v))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what is queued elsewhere would overtake
        late = [(2 * x).detach().requires_grad_() for x in (q, k, v)]
        late = [(x / 2).detach().requires_grad_() for x in late]
        out = varlen_attn(*late, cu_seqlens, config=PATTERNS[0])
        found = gradients(out, late)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected) and all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_torch_waits_for_nothing_but_the_first_copy_of_lengths():
    q, k, v, cu_seqlens = on_gpu([900, 300])
    lengths = cu_seqlens.cuda()
    varlen_attn(q, k, v, lengths, config=PATTERNS[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = varlen_attn(q, k, v, lengths, config=PATTERNS[0])
        out.backward(torch.ones_like(out))
        with pytest.raises(RuntimeError, match="sync"):
            varlen_attn(q, k, v, lengths.clone(), config=PATTERNS[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_that_changed_are_copied_again():
    q, k, v, cu_seqlens = on_gpu([900, 300])
    lengths = cu_seqlens.cuda()
    varlen_attn(q, k, v, lengths, config=DENSE)
    lengths[1] = 500
    assert torch.equal(varlen_attn(q, k, v, lengths, config=DENSE), varlen_attn(q, k, v, [0, 500, 1200], config=DENSE))


@pytest.mark.parametrize("config", [DENSE, PATTERNS[0]], ids=["dense", "topk"])
def test_opcheck(config, deterministic):
    q, k, v, cu_seqlens = on_gpu([400, 33])
    none = torch.empty(0, dtype=torch.int32)
    arguments = (q, k, v, cu_seqlens, none, none, none.float(), config.spec, 0.2, 0)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if config is DENSE:  # compares all outputs of two runs, and the order of work in the lists may differ
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(FORWARD, arguments, test_utils=checks)


def test_compiles_as_one_graph_for_any_lengths(deterministic):
    attend = torch.compile(
        lambda q, k, v, cu: varlen_attn(2 * q, k, v, cu, config=PATTERNS[0]) + 1,
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for lengths in ([700, 400], [900]):
        q, k, v, cu_seqlens = on_gpu(lengths)
        out, expected = attend(q, k, v, cu_seqlens), varlen_attn(2 * q, k, v, cu_seqlens, config=PATTERNS[0]) + 1
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients(out, (q, k, v)), gradients(expected, (q, k, v))))


def test_no_tokens():
    q, k, v, cu_seqlens = on_gpu([0])
    assert varlen_attn(q, k, v, cu_seqlens, config=DENSE).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens=[0, 50]), "rise from 0 to the 100 tokens"),
        (dict(budgets=[1, 2]), "2 budgets for 1"),
        (dict(v=torch.zeros(100, 2, 64, dtype=torch.bfloat16)), "v is on cpu and q on cuda"),
        (dict(dtype=torch.float16), "float16"),
        (dict(width=72), "head_dim is 72"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    q, k, v, cu_seqlens = on_gpu([100], change.pop("width", 64), change.pop("dtype", torch.bfloat16))
    with pytest.raises(sb.UserError, match=message):
        varlen_attn(**(dict(q=q, k=k, v=v, cu_seqlens=cu_seqlens, config=DENSE) | change))


def test_a_model_of_transformers_trains():
    transformers = pytest.importorskip("transformers")
    import sparsebalance.transformers as sbtr

    def step(attention, checkpointing, config=DENSE):
        torch.manual_seed(0)
        settings = transformers.Qwen2Config(
            vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation=attention,
        )  # fmt: skip
        model = transformers.Qwen2ForCausalLM(settings).to("cuda", torch.bfloat16)
        learner = sbtr.configure(model, config) if attention == "sparsebalance" else None
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        ids = torch.randint(0, 128, (1, 1200), device="cuda")
        positions = torch.cat([torch.arange(700), torch.arange(500)])[None].cuda()
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits.float().square().mean().backward()
        if learner is not None:
            learner.learn()
            assert learner.state_dict()["planes"].shape[0] == 2
        return logits, [parameter.grad for parameter in model.parameters()]

    dense, expected = step("sparsebalance", False), step("sdpa", False)
    assert_close(dense[0], expected[0].float(), torch.bfloat16)
    config = AttentionConfig(pattern="mass", score="planes", score_channels=16, block=64, budget=256, local_blocks=1)
    plain, again = (step("sparsebalance", checkpointing, config) for checkpointing in (False, True))
    assert torch.equal(plain[0], again[0]) and not torch.equal(plain[0], dense[0])


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_capture_of_a_graph_is_refused(where):
    q, k, v, cu_seqlens = on_gpu([300, 200])
    cu_seqlens = cu_seqlens.to(where)
    with pytest.raises(sb.UserError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        varlen_attn(q, k, v, cu_seqlens, config=DENSE)
    torch.cuda.synchronize()
    assert varlen_attn(q, k, v, cu_seqlens, config=DENSE).isfinite().all()


def test_too_many_sequences_are_refused_with_the_cure():
    q, k, v, cu_seqlens = on_gpu([1] * 66)
    with pytest.raises(sb.UserError, match="66 sequences in 66 tokens; at most 65 .* spread them over several"):
        varlen_attn(q, k, v, cu_seqlens, config=DENSE)
