"""What extension.py trains and evaluates on, made from the corpus and the same every time.

A model of this size and so few tokens does not learn by itself to copy over long distances, so that held-out passages that are
there twice would tell nothing. Therefore a quarter of the training documents have passages that were there before, up to the whole
length back: at the base's length in its sequences, at the long ones in theirs. All methods see the same ones."""

import lzma
import random
import shutil

import token_files

REPEATING = 1 / 4  # of the documents
PASSAGE = (64, 1024)  # tokens of a repeated passage, log-uniform
SHARE = 0.5  # of such a document's tokens, about

# What `sparsebalance data synth` writes for the fine-tuning: eight keys with values of two tokens, four of them asked for; four chains
# of assignments, of which the six variables that hold one value are asked for.
TASKS = {"needles": ["--task", "needle_multi_query", "--needles", 8, "--queries", 4, "--value-tokens", 2],
         "tracking": ["--task", "variable_tracking", "--chains", 4, "--hops", 5]}


def unpack(data, folder):
    """The corpus, out of its .xz files where it is packed."""
    if not (data / "train.bin.xz").exists():
        return data
    if not (folder / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("train", "validation"):
            with lzma.open(data / f"{name}.bin.xz") as packed, open(folder / f"{name}.bin", "wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
            shutil.copy(data / f"{name}.idx", folder)
        shutil.copy(data / "manifest.json", folder)
    return folder


def repeat_passages(tokens, draw, smallest=PASSAGE[0], largest=PASSAGE[1]):
    """Tokens (as bytes, two each) in which passages are replaced by what stands anywhere before them."""
    count, position, out = len(tokens) // 2, 0, bytearray(tokens)
    while True:
        size = round(smallest * (largest / smallest) ** draw.random())
        position += max(size, round(draw.expovariate(SHARE / (size * (1 - SHARE)))))
        if position + size > count:
            return bytes(out)
        source = draw.randrange(position - size + 1)
        out[2 * position:2 * (position + size)] = out[2 * source:2 * (source + size)]
        position += size


def write_training(corpus, prefix, length, largest=PASSAGE[1]):
    """The training part for sequences of at most `length` tokens, which are what documents are cut into: passages are repeated
    inside each."""
    source = token_files.TokenFile(corpus / "train")
    draw = random.Random(length)
    done = prefix.with_suffix(".idx")
    if done.exists():
        return
    with open(f"{prefix}.bin.partial", "wb") as out:
        for document in source.documents():
            if draw.random() < REPEATING:
                document = b"".join(repeat_passages(document[at:at + 2 * length], draw, min(PASSAGE[0], largest), largest)
                                    for at in range(0, len(document), 2 * length))
            out.write(document)
    prefix.with_suffix(".bin.partial").rename(f"{prefix}.bin")
    shutil.copy(corpus / "train.idx", done)


def write_held_out(corpus, folder, size, length):
    """Held-out sequences of exactly this length, and the same with a passage at the end that was there before. Returns how many;
    fewer than two are none."""
    if not (folder / f"copied-{length}.idx").exists():
        pieces = list(token_files.TokenFile(corpus / "validation").pieces(length, per_document=1))
        wanted = min(size["sequences"], len(pieces))
        if wanted < 2:
            return 0
        chosen = [pieces[i * len(pieces) // wanted] for i in range(wanted)]
        passage = size["passage"]
        backs = [back for back in size["back"] if back + passage <= length]
        token_files.write(folder / f"held-out-{length}", chosen)
        token_files.write(folder / f"copied-{length}",
                          [token_files.copied(piece, passage, backs[i % len(backs)]) for i, piece in enumerate(chosen)],
                          (length - passage, length))
    return len(token_files.TokenFile(folder / f"copied-{length}").lengths)


def task_lengths(size, draw, count=1000):
    """Four of five short, so that many questions are asked for the time, the others up to the longest; log-uniform both."""
    low, middle, high = size["task_lengths"]
    return [round(first * (end / first) ** draw.random())
            for first, end in ((low, middle) if i % 5 else (middle, high) for i in range(count))]


def write_tasks(program, folder, vocabulary, size):
    """Training files of the tasks at all lengths, held-out ones at the longest."""
    lengths = folder / "task-lengths.txt"
    lengths.write_text("\n".join(map(str, task_lengths(size, random.Random(1)))) + "\n", encoding="utf-8")
    each = -(-size["task_steps"] * size["task_batch"] // len(TASKS))
    for task, words in TASKS.items():
        for part, mix, sequences, seed in (("train", ["--lengths", lengths], each, 1),
                                           ("validation", [], size["task_sequences"], 2)):
            prefix = folder / f"{task}-{part}"
            if not prefix.with_suffix(".idx").exists():
                program.run(["data", "synth", *words, "--length", size["task_lengths"][-1], *mix, "--sequences", sequences,
                             "--vocab-size", vocabulary, "--seed", seed, "--output", prefix], folder / "tasks.log")


def self_test():
    tokens = b"".join(number.to_bytes(2, "little") for number in range(5000))
    found = repeat_passages(tokens, random.Random(1))
    assert len(found) == len(tokens) and found == repeat_passages(tokens, random.Random(1))
    values = [int.from_bytes(found[i:i + 2], "little") for i in range(0, len(found), 2)]
    changed = [i for i, value in enumerate(values) if value != i]
    assert 0.1 < len(changed) / 5000 < 0.7 and all(values[i] < i for i in changed), "what is repeated was there before"
    starts = [i for i in changed if i - 1 not in changed or values[i] != values[i - 1] + 1]
    assert len(changed) / len(starts) > 50, "passages, not single tokens"
    assert repeat_passages(tokens[:2], random.Random(1)) == tokens[:2] and repeat_passages(b"", random.Random(1)) == b""
    lengths = task_lengths({"task_lengths": (192, 1024, 16384)}, random.Random(1))
    assert min(lengths) >= 192 and max(lengths) <= 16384 and sum(length <= 1024 for length in lengths) == 800
