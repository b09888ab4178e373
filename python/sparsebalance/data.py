"""Token files from whatever Python reads: data sets of Hugging Face's, Parquet, Arrow, generators.

    from_dataset(datasets.load_dataset("parquet", data_files="a.parquet", split="train"), tokenizer, "data/long")

Rows are plain text (a column `text`), chats (`messages`, by the tokenizer's own chat template) or tokens (`input_ids`, with
`labels` or not)."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from sparsebalance import _core

__all__ = ["TokenFile", "TokenWriter", "encode", "from_dataset", "open_token_file"]

TokenFile = _core.TokenFile
IGNORED = -100  # of labels


def open_token_file(path: str | os.PathLike[str]) -> _core.TokenFile:
    """A prefix of .bin/.idx, or an llm.c .bin file."""
    return _core.open_token_file(os.fspath(path))


class TokenWriter:
    """Writes PREFIX.bin, PREFIX.idx and, where some tokens are no targets, PREFIX.mask. They get their names when the `with`
    block ends well, and nothing is left of them where it does not."""

    def __init__(self, prefix: str | os.PathLike[str], *, vocab_size: int, overwrite: bool = False) -> None:
        prefix = os.fspath(prefix)
        if not overwrite and os.path.exists(prefix + ".idx"):
            raise _core.UserError(f"{prefix}.idx already exists; choose another prefix, or replace it with overwrite=True")
        self._partial = prefix + ".partial"
        self._writer = _core.TokenWriter(prefix, int(vocab_size), overwrite)
        self._vocab_size = int(vocab_size)

    def add(self, tokens: Sequence[int], targets: Sequence[int] | None = None) -> None:
        """One document; targets: one flag a token, None: all. The first token is never one."""
        ids = np.ascontiguousarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise _core.UserError(f"document {self._writer.documents}: a token is not in 0 to {self._vocab_size - 1}")
        flags = np.zeros(0, np.uint8) if targets is None else np.ascontiguousarray(targets, dtype=bool).astype(np.uint8)
        self._writer.add(ids.astype(np.int32), flags)

    @property
    def documents(self) -> int:
        return self._writer.documents

    @property
    def tokens(self) -> int:
        return self._writer.tokens

    def finish(self) -> None:
        self._writer.finish()

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None or self.documents == 0:  # without documents, finish() has nothing to do but to say so
            shutil.rmtree(self._partial, ignore_errors=True)
        if kind is None:
            self.finish()


def _chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """By the template's own marks of what the assistant says ({% generation %}); without them by what each answer adds."""
    if getattr(tokenizer, "chat_template", "") is None:
        raise _core.UserError(
            "a chat (messages) needs a chat template, and the tokenizer has none: take the tokenizer of the chat model, or "
            "set tokenizer.chat_template"
        )
    messages = list(messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(whole["input_ids"]), list(whole.get("assistant_masks", []))
    if any(mask):
        return ids, mask
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:i], tokenize=True, return_dict=True, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=True, return_dict=True)
        begin, end = len(before["input_ids"]), len(after["input_ids"])
        if ids[:begin] != list(before["input_ids"]) or ids[:end] != list(after["input_ids"]):
            raise _core.UserError(
                f"message {i + 1}: the chat template writes a chat otherwise than its beginning, so that it cannot be seen "
                "which tokens are the assistant's; mark them with {% generation %} in the template"
            )
        mask[begin:end] = [1] * (end - begin)
    return ids, mask


def encode(row: Mapping[str, Any], tokenizer: Any, *, text: str = "text") -> tuple[list[int], list[int] | None]:
    """Tokens of a row, and which of them are targets (None: all)."""
    if "input_ids" in row:
        labels = row.get("labels")
        return list(row["input_ids"]), None if labels is None else [int(label != IGNORED) for label in labels]
    if "messages" in row:
        return _chat(row["messages"], tokenizer)
    if text in row:
        return list(tokenizer(row[text])["input_ids"]), None
    raise _core.UserError(f"none of input_ids, messages and {text} is there among {', '.join(map(str, row))}")


def from_dataset(
    dataset: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    prefix: str | os.PathLike[str],
    *,
    text: str = "text",
    append_end: bool = True,
    overwrite: bool = False,
    vocab_size: int | None = None,
) -> TokenWriter:
    """Writes every row as a document; of plain text, the end token closes it, where the tokenizer has not put it there.
    `vocab_size` where there is no tokenizer. Rows without a target are an error that names them."""
    with TokenWriter(prefix, vocab_size=vocab_size or len(tokenizer), overwrite=overwrite) as writer:
        for number, row in enumerate(dataset):
            try:
                tokens, targets = encode(row, tokenizer, text=text)
                end = getattr(tokenizer, "eos_token_id", None)
                if append_end and targets is None and "input_ids" not in row and end is not None and tokens[-1:] != [end]:
                    tokens.append(end)
                writer.add(tokens, targets)
            except _core.UserError as error:
                raise _core.UserError(f"row {number}: {error}") from error
            except Exception as error:  # of the tokenizer, its template or the row's types
                error.add_note(f"This is about row {number} of the dataset.")
                raise
    return writer
