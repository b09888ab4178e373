"""Token files (docs/data.md) in pieces of one length: what an evaluation at a length needs. Tokens are u16."""

import array
import struct


class TokenFile:
    """PREFIX.bin and PREFIX.idx, one sequence a document, as scripts/make-corpus.py writes them."""

    def __init__(self, prefix):
        self.prefix = prefix
        with open(f"{prefix}.idx", "rb") as file:
            head = file.read(34)
            magic, _, code, count, _ = struct.unpack("<9sQBQQ", head)
            if magic != b"MMIDIDX\0\0" or code != 8:
                raise SystemExit(f"{prefix}.idx: not a Megatron index of u16 tokens")
            self.lengths = array.array("i", file.read(4 * count))
            self.offsets = array.array("q", file.read(8 * count))

    def pieces(self, length, per_document=None):
        """The bytes of consecutive pieces of exactly this many tokens, at most so many of a document; shorter ends are left
        out."""
        with open(f"{self.prefix}.bin", "rb") as file:
            for own, offset in zip(self.lengths, self.offsets):
                whole = own // length
                for piece in range(whole if per_document is None else min(whole, per_document)):
                    file.seek(offset + 2 * piece * length)
                    yield file.read(2 * length)

    def documents(self):
        """The bytes of every document."""
        with open(f"{self.prefix}.bin", "rb") as file:
            for own, offset in zip(self.lengths, self.offsets):
                file.seek(offset)
                yield file.read(2 * own)


def write(prefix, pieces, targets=None):
    """Pieces as documents; with `targets` (first, end) only those tokens of each are predicted."""
    lengths = [len(piece) // 2 for piece in pieces]
    starts, position = array.array("q"), 0
    for length in lengths:
        starts.append(position)
        position += 2 * length
    with open(f"{prefix}.bin", "wb") as out:
        out.writelines(pieces)
    if targets is not None:
        with open(f"{prefix}.mask", "wb") as out:
            out.write(mask(lengths, *targets))
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        for column in (array.array("i", lengths), starts, array.array("q", range(len(lengths) + 1))):
            column.tofile(out)


def mask(lengths, first, end):
    """PREFIX.mask for documents of which the tokens from `first` to before `end` are targets."""
    bits = sum(1 << token for token in range(first, end))
    bitmaps = [bits.to_bytes((length + 7) // 8, "little") for length in lengths]
    valid = struct.pack(f"<{len(lengths)}i", *[end - first] * len(lengths))
    offsets = [sum(map(len, bitmaps[:i])) for i in range(len(lengths) + 1)]
    return (b"SBLABELS" + struct.pack("<QQQ", 1, len(lengths), sum(lengths)) + valid + b"\0" * (-len(valid) % 8)
            + struct.pack(f"<{len(offsets)}q", *offsets) + b"".join(bitmaps))


def copied(piece, passage, back):
    """The piece with its last `passage` tokens replaced by those `back` tokens before them."""
    end = len(piece) // 2
    start = end - passage
    if start - back < 0 or back < passage:
        raise ValueError(f"a passage of {passage} tokens, {back} back, in {end} tokens")
    return piece[:2 * start] + piece[2 * (start - back):2 * (end - back)]
