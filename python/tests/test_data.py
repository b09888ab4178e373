"""Token files from Python, read back here and by the command line tool."""

import numpy as np
import pytest

import sparsebalance as sb
from sparsebalance.data import TokenWriter, encode, from_dataset, open_token_file


class Letters:
    """A tokenizer of letters, whose chats read `<role>content.`; some of its templates mark what the assistant says."""

    eos_token_id = 127

    def __init__(self, marks=True, fickle=False):
        self.marks, self.fickle = marks, fickle

    def __len__(self):
        return 128

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, add_generation_prompt=False, return_assistant_tokens_mask=False, **_):
        text, mask = ("!" * len(messages) if self.fickle else ""), []
        mask += [0] * len(text)
        for message in messages:
            for part, own in ((f"<{message['role'][0]}>", False), (message["content"] + ".", message["role"] == "assistant")):
                text += part
                mask += [int(own)] * len(part)
        if add_generation_prompt:
            text += "<a>"
        return {"input_ids": [ord(c) for c in text], **({"assistant_masks": mask} if self.marks else {})}


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


def test_documents_come_back_as_they_were(tmp_path, program):
    documents = [([1, 2, 3], None), ([4, 5, 6, 7], [0, 0, 1, 1]), (np.arange(100), None)]
    with TokenWriter(tmp_path / "a", vocab_size=128) as writer:
        for tokens, targets in documents:
            writer.add(tokens, targets)
    file = open_token_file(tmp_path / "a")
    assert len(file) == 3 and sb.lengths(tmp_path / "a") == [3, 4, 100]
    for i, (tokens, targets) in enumerate(documents):
        own_tokens, own_targets = file.read(i)
        assert own_tokens.tolist() == list(tokens)
        assert own_targets.tolist() == ([0] + [1] * (len(tokens) - 1) if targets is None else targets)
    assert "3" in program("data", "stats", tmp_path / "a")
    with pytest.raises(sb.UserError, match="not 3"):
        file.read(3)


def test_nothing_is_left_of_what_failed(tmp_path):
    with pytest.raises(RuntimeError), TokenWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add([1, 2])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(sb.UserError, match="no documents"), TokenWriter(tmp_path / "a", vocab_size=10):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("marks", [True, False])
def test_what_the_assistant_says_is_the_target(marks):
    tokens, targets = encode({"messages": CHAT}, Letters(marks))
    text = "".join(map(chr, tokens))
    assert text == "<u>hi.<a>yo.<u>so.<a>no."
    assert "".join(c for c, t in zip(text, targets) if t) == "yo.no."


def test_a_template_that_cannot_be_told_apart_is_refused():
    with pytest.raises(sb.UserError, match="generation"):
        encode({"messages": CHAT}, Letters(marks=False, fickle=True))


def test_rows_of_every_kind(tmp_path):
    rows = [{"text": "abc"}, {"messages": CHAT}, {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9]}]
    writer = from_dataset(rows, Letters(), tmp_path / "a")
    assert writer.documents == 4
    file = open_token_file(tmp_path / "a")
    assert file.read(0)[0].tolist() == [97, 98, 99, 127]
    assert file.read(2)[1].tolist() == [0, 0, 1] and file.read(3)[0].tolist() == [8, 9]
    with pytest.raises(sb.UserError, match="a.idx already exists; .* overwrite=True"):
        from_dataset(rows, Letters(), tmp_path / "a")
    from_dataset(rows[:1], Letters(), tmp_path / "a", overwrite=True)
    assert len(open_token_file(tmp_path / "a")) == 1


def test_an_end_that_the_tokenizer_writes_is_not_written_twice(tmp_path):
    class Ending(Letters):
        def __call__(self, text):
            return {"input_ids": [*super().__call__(text)["input_ids"], self.eos_token_id]}

    from_dataset([{"text": "abc"}], Ending(), tmp_path / "a")
    assert open_token_file(tmp_path / "a").read(0)[0].tolist() == [97, 98, 99, 127]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": "a"}, "row 1: none of input_ids, messages and text"),
        ({"input_ids": [1, 500]}, "row 1: document 1: a token is not in 0 to 127"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "row 1"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, message):
    with pytest.raises(sb.UserError, match=message) as refused:
        from_dataset([{"text": "good"}, row], Letters(), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    from_dataset([{"text": "good"}], Letters(), tmp_path / "a")  # while the error still holds the writer that failed
    assert len(open_token_file(tmp_path / "a")) == 1 and refused.tb is not None


def test_what_fails_leaves_an_earlier_output_as_it_was(tmp_path):
    from_dataset([{"text": "good"}], Letters(), tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(sb.UserError, match="row 0"):
        from_dataset([{"words": "a"}], Letters(), tmp_path / "a", overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_errors_of_a_tokenizer_come_with_the_row(tmp_path):
    class Strict(Letters):
        def apply_chat_template(self, messages, **_):
            raise KeyError("roles must alternate")

    with pytest.raises(KeyError, match="roles must alternate") as raised:
        from_dataset([{"text": "good"}, {"messages": CHAT}], Strict(), tmp_path / "a")
    assert raised.value.__notes__ == ["This is about row 1 of the dataset."] and list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_row_and_the_cure(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0, "?": 1}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    with pytest.raises(sb.UserError, match="row 1: a chat .* needs a chat template.* set tokenizer.chat_template"):
        from_dataset([{"text": "hi"}, {"messages": CHAT}], tokenizer, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_parquet_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset.from_list([{"text": "abc"}, {"text": "de"}])
    source.to_parquet(tmp_path / "a.parquet")
    rows = datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", cache_dir=str(tmp_path))
    from_dataset(rows, Letters(), tmp_path / "a", append_end=False)
    assert [open_token_file(tmp_path / "a").read(i)[0].tolist() for i in range(2)] == [[97, 98, 99], [100, 101]]
