"""Writes small GPT-2 and Llama-3 style tokenizers and what they must give, from a naive implementation of its own.

Shares no code with the project: byte-level BPE by the textbook (merge the best-ranked pair until none is left), the
pre-tokenizers by Python's `regex` module, NFC by `unicodedata`. Run it in this folder to write the files again.
"""
import collections
import json
import unicodedata

import regex

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")

CORPUS = """The quick brown fox jumps over the lazy dog. The dog wasn't amused; it's said that they'd never forgive the fox.
In the beginning the training of language models on long sequences was slow, for attention grows with the square of
the length. def function(argument):\n    return argument ** 2\n\nпривет мир, это тест. 北京大学 東京大学 naïve café
1234 5678 1999 2024 3.14159 100000 the there then these those this that than thank thanks throughout
""" * 3

CASES = [
    "Hello world", "  leading", "trailing  ", "a  b   c    d", "don't I'M we'LL they've it's O'Neil 'sam",
    "1234567 12 3.14159 1e-5 ½ Ⅷ ٣٤٥", "tabs\tand\nnewlines\r\n\r\n  \n end", "\n\n\n   x", "   ", "", "\u00a0nbsp\u2003em",
    "naïve café e\u0301 A\u030a", "北京大学 東京 こんにちは", "Привет, мир!", "🙂🚀 👨‍👩‍👧", "the thethe THE", "foo_bar(baz)[0] += 1; // !?",
    "x\u180ey \u200b z\u2028w", "thethethethethethethethethethethethethethethethethethethethethethethethethe" * 3,
    "<|endoftext|>the<|endoftext|>", "a <|strip|> b", "a<|right|>   b", "word in words, word!", "'ſ K's",
    "\r\n\r\n;;;\n\nend", "a\u0300\u0301b",
]


def byte_characters():
    visible = list(range(ord("!"), ord("~") + 1)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    table, extra = {}, 0
    for b in range(256):
        if b in visible:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


BYTE = byte_characters()


def spell(piece):
    return [BYTE[b] for b in piece.encode()]


def train(pattern, size):
    words = collections.Counter(tuple(spell(w)) for w in regex.findall(pattern, CORPUS))
    vocab, merges = [BYTE[b] for b in sorted(BYTE, key=lambda b: BYTE[b])], []
    while len(vocab) < size:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        vocab.append(best[0] + best[1])
        merged = collections.Counter()
        for word, count in words.items():
            merged[tuple(merge(list(word), best))] += count
        words = merged
    return {token: i for i, token in enumerate(vocab)}, merges


def merge(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return out


def bpe(word, vocab, ranks, ignore_merges):
    symbols = spell(word)
    if ignore_merges and "".join(symbols) in vocab:
        return [vocab["".join(symbols)]]
    while True:
        known = [(ranks[p], p) for p in zip(symbols, symbols[1:]) if p in ranks]
        if not known:
            return [vocab[s] for s in symbols]
        symbols = merge(symbols, min(known)[1])


def is_word(c):
    return c.isalnum() or c == "_"


def split_added(text, tokens):
    """Pieces (text or token): leftmost, of those the longest; strips and single words as the flags say."""
    out, done, at = [], 0, 0
    while at < len(text):
        found = max((t for t in tokens if text.startswith(t["content"], at)), key=lambda t: len(t["content"]), default=None)
        if not found:
            at += 1
            continue
        begin, end = at, at + len(found["content"])
        at = end
        if found["single_word"] and ((begin and is_word(text[begin - 1])) or (end < len(text) and is_word(text[end]))):
            continue
        while found["lstrip"] and begin > done and text[begin - 1].isspace():
            begin -= 1
        while found["rstrip"] and end < len(text) and text[end].isspace():
            end += 1
        if begin > done:
            out.append(text[done:begin])
        out.append(found)
        done = at = end
    if done < len(text):
        out.append(text[done:])
    return out


def encode(text, pattern, vocab, merges, added, nfc, ignore_merges, prefix_space):
    ranks = {pair: i for i, pair in enumerate(merges)}
    ids = []
    for piece in split_added(text, added):
        if isinstance(piece, dict):
            ids.append(piece["id"])
            continue
        if nfc:
            piece = unicodedata.normalize("NFC", piece)
        if prefix_space and not piece.startswith(" "):
            piece = " " + piece
        for word in regex.findall(pattern, piece):
            ids += bpe(word, vocab, ranks, ignore_merges)
    return ids


def token(i, content, **flags):
    entry = {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
    entry.update(flags)
    return entry


def write(name, pattern, pre_tokenizer, post_processor, pairs, ignore_merges=False, prefix_space=False, nfc=False):
    vocab, merges = train(pattern, 420)
    # A word no merge leads to: only a tokenizer that ignores merges for whole words finds it.
    vocab["Ġthethe"] = len(vocab)
    added = [token(len(vocab), "<|endoftext|>"), token(len(vocab) + 1, "<|strip|>", lstrip=True, rstrip=True),
             token(len(vocab) + 2, "<|right|>", rstrip=True), token(len(vocab) + 3, "word", single_word=True, special=False)]
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]} if nfc else None,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor(added[0]["id"]) if post_processor else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "ignore_merges": ignore_merges, "vocab": vocab,
                  "merges": [list(m) for m in merges] if pairs else [" ".join(m) for m in merges]},
    }
    with open(f"{name}.json", "w", encoding="utf-8") as file:
        json.dump(spec, file, ensure_ascii=False)
        file.write("\n")
    cases = [{"text": t, "ids": encode(t, pattern, vocab, merges, added, nfc, ignore_merges, prefix_space)}
             for t in CASES]
    with open(f"{name}.expected.json", "w", encoding="utf-8") as file:
        json.dump(cases, file)
        file.write("\n")


def bos(i):
    return {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [], "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [i], "tokens": ["<|endoftext|>"]}}}]}


def byte_level(prefix_space, use_regex):
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": use_regex}


write("gpt2_style", GPT2, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, None, pairs=False)
write("gpt2_prefix_space", GPT2, byte_level(True, True), None, pairs=False, prefix_space=True)
write("llama3_style", LLAMA3, {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}, byte_level(False, False)]},
      bos, pairs=True, ignore_merges=True)
write("llama3_removed_nfc", LLAMA3, {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Removed", "invert": True}, byte_level(False, False)]},
      None, pairs=True, nfc=True)
