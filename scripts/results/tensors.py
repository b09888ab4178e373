"""Tensors of a safetensors file: a hash of every one, and its norm, which says how far apart two different ones are."""

import hashlib
import json
import math
import operator
import struct


def tensors(path):
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    begin = 8 + size
    for name, entry in sorted(json.loads(content[8:begin]).items()):
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, entry["dtype"], memoryview(content)[begin + first : begin + last]


def short_hash(data):
    return hashlib.sha256(data).hexdigest()[:16]


def norm(dtype, data):
    if dtype != "F32":
        return None
    values = data.cast("f")
    return math.sqrt(sum(map(operator.mul, values, values)))


def hashes(path, prefix=""):
    """{name: {"hash", "norm"}} of the tensors whose names begin with the prefix."""
    return {name[len(prefix) :]: {"hash": short_hash(data), "norm": norm(dtype, data)}
            for name, dtype, data in tensors(path) if name.startswith(prefix)}


def one_hash(path):
    whole = hashlib.sha256()
    for name, dtype, data in tensors(path):
        whole.update(f"{name} {dtype} ".encode())
        whole.update(data)
    return whole.hexdigest()[:16]
