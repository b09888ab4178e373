"""Models of transformers with our attention against the same with sdpa."""

import copy
import json
import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sparsebalance as sb  # noqa: E402
import sparsebalance.transformers as sbt  # noqa: E402
from sparsebalance.torch import AttentionConfig  # noqa: E402
from sparsebalance.trainer import BalancedTrainerMixin, LearningCallback, PackedCollator  # noqa: E402

DENSE = AttentionConfig(pattern="dense")
SPARSE = AttentionConfig(block=64, budget=320, local_blocks=1)
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}


def make_model(family="qwen2", attention="sparsebalance", config=DENSE, **sizes):
    config_class, model_class = FAMILIES[family]
    settings = config_class(**{**SIZES, **sizes}, attn_implementation=attention)
    torch.manual_seed(0)
    model = model_class(settings)
    with torch.no_grad():  # weights of 0.02 would hide most of what attention does
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    if config is not None:
        sbt.configure(model, config)
    return model


def sdpa_model(family="qwen2"):
    return make_model(family, "sdpa", config=None)


def tokens(batch, length, seed=0):
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_and_gradients(model, **batch):
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    (logits * torch.linspace(-1, 1, 128)).mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(own, other, atol=1e-5):
    torch.testing.assert_close(own[0], other[0], rtol=1e-5, atol=atol)
    for name in own[1]:
        torch.testing.assert_close(own[1][name], other[1][name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_logits_and_gradients_are_those_of_sdpa(family):
    ids = tokens(2, 150)
    own = logits_and_gradients(make_model(family), input_ids=ids)
    assert_same(own, logits_and_gradients(sdpa_model(family), input_ids=ids))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_attended(side):
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.int64)
    mask[1, :30 if side == "left" else None] = 0
    if side == "right":
        mask[1] = 1
        mask[1, 70:] = 0
    own = make_model()(input_ids=ids, attention_mask=mask).logits
    other = sdpa_model()(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(own[mask == 1], other[mask == 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("told_by", ["cu_seq_lens", "position_ids"])
def test_packed_sequences_give_what_they_give_alone(config, told_by):
    model = make_model(config=config)
    parts = [tokens(1, length, seed=length) for length in (70, 1, 500, 129)]
    batch = PackedCollator()([{"input_ids": part[0]} for part in parts])
    batch.pop("labels")
    if told_by == "position_ids":
        batch = {name: batch[name] for name in ("input_ids", "position_ids")}
    packed = model(**batch).logits[0]
    begin = 0
    for part in parts:
        alone = model(input_ids=part).logits[0]
        torch.testing.assert_close(packed[begin : begin + part.shape[1]], alone, rtol=1e-5, atol=1e-5)
        begin += part.shape[1]


def test_budgets_by_keyword_are_those_of_the_layer():
    model, ids = make_model(config=SPARSE), tokens(1, 700)
    dense = make_model()(input_ids=ids).logits
    everything = torch.full((2, 1), 700)
    assert torch.equal(model(input_ids=ids, sb_budgets=everything).logits, dense)
    last = torch.tensor([[700], [320]])
    out = model(input_ids=ids, sb_budgets=last).logits
    assert not torch.allclose(out, dense, atol=1e-4) and not torch.allclose(out, model(input_ids=ids).logits, atol=1e-4)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_gradient_checkpointing_changes_no_bit(config):
    ids, model = tokens(1, 600), make_model(config=config)
    model.train()
    plain = logits_and_gradients(model, input_ids=ids)
    model.gradient_checkpointing_enable()
    again = logits_and_gradients(model, input_ids=ids)
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def test_compiles_as_one_graph():
    ids, model = tokens(1, 400), make_model(config=SPARSE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def test_generation_with_a_cache_is_that_of_sdpa():
    ids = tokens(2, 20)
    with pytest.warns(UserWarning, match="cache"):
        sbt._warned.clear()
        own = make_model().generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    other = sdpa_model().generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(own, other)


def test_the_configuration_is_saved_with_the_model(tmp_path):
    model, ids = make_model(config=SPARSE), tokens(1, 600)
    model.save_pretrained(tmp_path)
    sbt._configs.clear()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparsebalance")
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("config", [DENSE, SPARSE, AttentionConfig(pattern="mass")], ids=["dense", "topk", "mass"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_configuring_another_attention_warns_once_with_the_cure(attention, config):
    model = make_model(attention=attention, config=None)
    with pytest.warns(UserWarning) as warned:
        sbt.configure(model, config)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert f'is "{attention}". Load it with attn_implementation="sparsebalance"' in str(warned[0].message)


@pytest.mark.filterwarnings("error")
def test_configuring_our_attention_does_not_warn():
    sbt.configure(make_model(config=None), SPARSE)


@pytest.mark.filterwarnings("error:configure")
def test_in_the_place_of_sdpa():
    before = dict(transformers.AttentionInterface._global_mapping), dict(transformers.AttentionMaskInterface._global_mapping)
    try:
        sbt.install(replace="sdpa")
        model, ids = make_model(attention="sdpa", config=SPARSE), tokens(1, 600)
        assert torch.equal(model(input_ids=ids).logits, make_model(config=SPARSE)(input_ids=ids).logits)
    finally:
        transformers.AttentionInterface._global_mapping.update(before[0])
        transformers.AttentionMaskInterface._global_mapping.update(before[1])


def test_peft_on_top():
    peft = pytest.importorskip("peft")
    ids = tokens(1, 300)

    def adapted(model):
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    (own, own_gradients), (other, other_gradients) = adapted(make_model()), adapted(sdpa_model())
    torch.testing.assert_close(own, other)
    assert own_gradients
    for name, gradient in own_gradients.items():
        torch.testing.assert_close(gradient, other_gradients[name], rtol=1e-4, atol=1e-5)


class Documents(torch.utils.data.Dataset):
    def __init__(self, lengths):
        self.ids = [tokens(1, length, seed=length)[0] for length in lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class BalancedTrainer(BalancedTrainerMixin, transformers.Trainer):
    pass


takes_batch_samplers = pytest.mark.skipif(
    not hasattr(transformers.trainer_pt_utils, "BatchRebalanceSampler"), reason="Trainer takes none before transformers 5.17"
)


@takes_batch_samplers
def test_a_step_of_trainer_is_the_step_of_its_global_batch(tmp_path, small_model):
    """Two micro-batches, packed, at budgets of their own, against the loss over all sequences one by one."""
    lengths = [900, 60, 70, 80, 400, 50, 64, 33]
    planner = sb.Planner(
        small_model, dp=1, micro_batch_sequences=4, tuning="optimal",
        attention=sb.AttentionSpec(block=64, budget=320, local_blocks=1),
    )
    model = make_model(config=SPARSE)
    expected = copy.deepcopy(model)
    settings = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1, learning_rate=1e-2,
        max_grad_norm=0.0, optim="sgd", lr_scheduler_type="constant", report_to=[], use_cpu=True, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    documents = Documents(lengths)
    trainer = BalancedTrainer(
        model=model, args=settings, train_dataset=documents, data_collator=PackedCollator(), planner=planner
    )
    trainer.train()

    sampler = trainer._get_train_sampler().sampler
    targets = sum(length - 1 for length in lengths)
    total = 0
    for micro_batch in sampler:
        for index in micro_batch:
            ids = documents[int(index)]["input_ids"][None]
            budgets = torch.from_numpy(index.budgets)[:, None]
            logits = expected(input_ids=ids, sb_budgets=budgets).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / targets
    total.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= 1e-2 * parameter.grad
    for (name, own), other in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@takes_batch_samplers
def test_a_balanced_trainer_may_evaluate_without_training(tmp_path, small_model):
    settings = transformers.TrainingArguments(tmp_path, per_device_train_batch_size=4, report_to=[], use_cpu=True)
    trainer = BalancedTrainer(
        model=make_model(), args=settings, planner=sb.Planner(small_model, micro_batch_sequences=4),
        eval_dataset=Documents([40, 40]), data_collator=PackedCollator(),
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_trainer_that_takes_no_batch_samplers_is_refused(monkeypatch, small_model):
    monkeypatch.setattr("sparsebalance.trainer._BatchSampler", object)
    with pytest.raises(sb.UserError, match="needs transformers 5.17"):
        BalancedTrainer(model=make_model(), planner=sb.Planner(small_model, micro_batch_sequences=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sliding_window": 5}, "sliding_window"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "attention_dropout"),
        ({"is_causal": False}, "causal"),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, "4-D"),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, "batch of 2"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(arguments, message):
    model = make_model()
    q = torch.zeros(2 if "cu_seq_lens_q" in arguments else 1, 4, 8, 16)
    k = v = q[:, :2]
    with pytest.raises(sb.UserError, match=message):
        sbt.attention_forward(model.model.layers[0].self_attn, q, k, v, **{"attention_mask": None, **arguments})


def write_token_file(prefix, documents):
    """A Megatron pair, by its published layout."""
    sizes = np.array([len(document) for document in documents], dtype=np.int32)
    (prefix.parent / (prefix.name + ".bin")).write_bytes(b"".join(np.asarray(d, dtype=np.int32).tobytes() for d in documents))
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 4]).astype(np.int64)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(sizes), len(sizes) + 1)
    index = np.arange(len(sizes) + 1, dtype=np.int64)
    (prefix.parent / (prefix.name + ".idx")).write_bytes(header + sizes.tobytes() + pointers.tobytes() + index.tobytes())


@pytest.mark.parametrize("pattern", ["dense", "topk", "topp", "window"])
def test_the_loss_is_that_of_the_engine(tmp_path, program, pattern):
    """The same weights, tokens and pattern through the C++ model and through transformers."""
    chosen = dict(pattern=pattern, score="moments", block=64, budget=384, local_blocks=1, coverage=0.6)
    model = make_model("qwen3", config=AttentionConfig(**chosen), head_dim=16)
    model.save_pretrained(tmp_path / "model")
    documents = [tokens(1, length, seed=length)[0] for length in (900, 333, 1500)]
    write_token_file(tmp_path / "tokens", documents)
    run = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": [str(tmp_path / "tokens")]},
        "attention": chosen,
        "train": {"max_steps": 1, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    program(
        "eval", "ppl", "--model", tmp_path / "model", "--data", tmp_path / "tokens", "--attention", "as-trained",
        "--run-config", tmp_path / "run.yaml", "--json", tmp_path / "ppl.json",
    )  # fmt: skip
    engine = json.loads((tmp_path / "ppl.json").read_text())["rows"][-1]
    with torch.no_grad():
        losses = [model(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for d in documents]
    own = float(sum(losses)) / sum(len(d) - 1 for d in documents)
    assert own == pytest.approx(engine["loss"], abs=1e-5)


def test_what_mass_learns_is_what_the_engine_learns(tmp_path, program):
    """Steps that change no weight, over the same documents: what is learned from step to step moves the loss alike."""
    chosen = dict(pattern="mass", score="moments", block=64, budget=320, local_blocks=1)
    model = make_model("qwen3", config=AttentionConfig(**chosen), head_dim=16)
    model.save_pretrained(tmp_path / "model")
    documents = [tokens(1, length, seed=length)[0] for length in (900, 333, 1500)]
    write_token_file(tmp_path / "tokens", documents)
    run = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": [str(tmp_path / "tokens")]},
        "batch": {"global_batch_size": 3},
        "attention": chosen,
        "optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0},
        "train": {"max_steps": 5, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    program("train", tmp_path / "run.yaml")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    engine = [line["loss"] for line in lines if "loss" in line]
    learner, own = sbt.learner_of(model), []
    model.train()
    for _ in engine:
        with torch.no_grad():
            losses = [model(input_ids=d[None], labels=d[None]).loss * (len(d) - 1) for d in documents]
        own.append(float(sum(losses)) / sum(len(d) - 1 for d in documents))
        learner.learn()
    assert len(engine) == 5 and max(engine) - min(engine) > 1e-3
    assert own == pytest.approx(engine, abs=2e-5)


LEARNING = AttentionConfig(pattern="mass", score="planes", score_channels=8, block=64, budget=320, local_blocks=1)


def test_trainer_learns_saves_and_resumes(tmp_path):
    class Documents(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"input_ids": tokens(1, 700, seed=index)[0]}

    def train(folder, steps, resume=None, resume_from=None):
        model = make_model(config=LEARNING)
        settings = transformers.TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=steps, report_to=[], use_cpu=True, save_steps=1,
            lr_scheduler_type="constant", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        )  # fmt: skip
        learner = sbt.learner_of(model)
        trainer = transformers.Trainer(
            model=model, args=settings, train_dataset=Documents(), data_collator=PackedCollator(),
            callbacks=[LearningCallback(learner, resume_from)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return learner.state_dict()

    whole = train(tmp_path / "a", 3)
    assert whole["planes"].shape == (2, 97) and len(whole["thresholds"]) == 2
    train(tmp_path / "b", 1)
    resumed = train(tmp_path / "b", 3, resume=True)
    assert torch.equal(resumed["planes"], whole["planes"]) and torch.equal(resumed["thresholds"], whole["thresholds"])
    elsewhere = str(tmp_path / "b" / "checkpoint-1")
    with pytest.raises(sb.UserError, match="c/checkpoint-1/sparsebalance_selection.pt: there is no such file.*resume_from="):
        train(tmp_path / "c", 3, resume=elsewhere)
    moved = train(tmp_path / "c", 3, resume=elsewhere, resume_from=elsewhere)
    assert torch.equal(moved["planes"], whole["planes"]) and torch.equal(moved["thresholds"], whole["thresholds"])


def test_the_recommended_pattern_trains_narrow_heads():
    """As docs/python.md has it: nothing is said of score_channels, whose default is more than the 16 of these heads."""
    model = make_model(config=AttentionConfig(pattern="mass", score="planes", budget=640)).train()
    for step in range(2):
        ids = tokens(1, 900, seed=step)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        sbt.learner_of(model).learn()
    assert sbt.learner_of(model).state_dict()["planes"].shape == (2, 1 + 3 * 2 * 16)


def test_a_copied_model_has_a_learner_of_its_own():
    model = make_model(config=LEARNING).train()
    batch = dict(input_ids=tokens(1, 700), use_cache=False)
    model(**batch)
    sbt.learner_of(model).learn()
    other = copy.deepcopy(model)
    learners = {id(layer.self_attn._sparsebalance_learner) for layer in other.model.layers}
    assert learners == {id(sbt.learner_of(other))} and sbt.learner_of(other) is not sbt.learner_of(model)
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    fresh = make_model(config=LEARNING)
    assert not torch.equal(fresh(**batch).logits, model(**batch).logits)


def test_patterns_that_learn_need_a_learner(tmp_path):
    make_model(config=LEARNING).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparsebalance")
    with pytest.raises(sb.UserError, match="learns from step to step"):
        model(input_ids=tokens(1, 100))
