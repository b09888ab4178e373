"""Our model under the LM evaluation harness beside its own backend of transformers, offline."""

import json
import pathlib
import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
harness = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from sparsebalance import UserError  # noqa: E402
from sparsebalance.lm_eval import SparseBalanceLM  # noqa: E402

TOKENIZER = pathlib.Path(__file__).parents[2] / "examples" / "small" / "tokenizer.json"
MAX_LENGTH = 192
WORDS = "river stone amber quiet lantern seven orchard winter copper violet meadow harbour".split()


def sentence(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), eos_token="<|endoftext|>")
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer), max_position_embeddings=MAX_LENGTH, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():  # weights of 0.02 would make all answers alike
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def backends(checkpoint):
    ours = SparseBalanceLM(pretrained=str(checkpoint), threads=2, batch_size=2)
    theirs = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1)
    yield ours, theirs
    ours.close()


def requests(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


def test_loglikelihoods_are_those_of_transformers(backends):
    rng = random.Random(1)
    asked = [(sentence(rng, rng.randint(1, 12)), " " + sentence(rng, rng.randint(1, 3))) for _ in range(12)]
    asked.append(("", sentence(rng, 2)))
    asked.append((sentence(rng, 60), " " + sentence(rng, 2)))  # longer than max_length: the beginning goes
    ours, theirs = (backend.loglikelihood(requests("loglikelihood", asked)) for backend in backends)
    for (value, greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(expected, abs=2e-3)
        assert greedy == expected_greedy


def test_greedy_is_said_where_it_is(backends):
    prompt = "river stone"
    answer = backends[1].generate_until(requests("generate_until", [(prompt, {"until": ["\0"], "max_gen_toks": 1})]))[0]
    if not answer:
        pytest.skip("the likeliest token is no text")
    both = [backend.loglikelihood(requests("loglikelihood", [(prompt, answer), (prompt, " seven")])) for backend in backends]
    assert [greedy for _, greedy in both[0]] == [greedy for _, greedy in both[1]]


def test_rolling_loglikelihoods_are_those_of_transformers(backends):
    rng = random.Random(2)
    asked = [(sentence(rng, words),) for words in (1, 8, 90)]
    ours, theirs = (backend.loglikelihood_rolling(requests("loglikelihood_rolling", asked)) for backend in backends)
    assert ours == pytest.approx(theirs, abs=2e-2)


def test_answers_are_those_of_transformers(backends):
    rng = random.Random(3)
    asked = [(sentence(rng, words), {"until": ["e"], "max_gen_toks": 24}) for words in (2, 5, 9)]
    asked += [(sentence(rng, 4), {"until": ["\0"], "max_gen_toks": 10})]
    ours, theirs = (backend.generate_until(requests("generate_until", asked)) for backend in backends)
    assert ours == theirs
    assert any(ours)


def test_options_that_the_engine_lacks_are_named(backends):
    with pytest.raises(UserError, match="top_k"):
        backends[0].generate_until(requests("generate_until", [("a", {"until": ["b"], "top_k": 4})]))


def test_a_gpu_by_number_is_refused_with_the_cure(checkpoint):
    with pytest.raises(UserError, match="device=cuda:1.*CUDA_VISIBLE_DEVICES"):
        SparseBalanceLM(pretrained=str(checkpoint), device="cuda:1")


def test_a_model_that_is_not_there_is_named(checkpoint):
    with pytest.raises(UserError, match="ended with code 2"):
        SparseBalanceLM(pretrained=str(checkpoint), attention="as-trained")  # there is no run.yaml


def test_accuracy_of_an_offline_task_is_that_of_hf(checkpoint, tmp_path):
    rng = random.Random(4)
    with open(tmp_path / "questions.jsonl", "w") as file:
        for _ in range(60):
            choices = [sentence(rng, rng.randint(1, 3)) for _ in range(4)]
            row = {"question": sentence(rng, 8), "choices": choices, "answer": rng.randrange(4)}
            file.write(json.dumps(row) + "\n")
    (tmp_path / "made.yaml").write_text(
        f"""task: made
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path / "questions.jsonl"}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )

    def results(model, arguments):
        return harness.simple_evaluate(
            model=model,
            model_args={"pretrained": str(checkpoint), **arguments},
            tasks=["made"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            batch_size=1,
            device="cpu",
        )["results"]["made"]

    ours, theirs = results("sparsebalance", {"threads": 2}), results("hf", {"dtype": "float32"})
    for metric in ("acc,none", "acc_norm,none"):
        assert ours[metric] == theirs[metric]
    assert 0 < ours["acc,none"] < 1
