"""Tensors of safetensors files, each in one of them: a hash of every one, and its norm, which says how far apart two different ones are."""

import hashlib
import json
import math
import operator
import struct


def tensors(paths):
    """By name, whatever file each is in."""
    found = {}
    for path in paths:
        content = path.read_bytes()
        (size,) = struct.unpack_from("<Q", content)
        begin = 8 + size
        for name, entry in json.loads(content[8:begin]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = entry["dtype"], memoryview(content)[begin + first : begin + last]
    for name, (dtype, data) in sorted(found.items()):
        yield name, dtype, data


def short_hash(data):
    return hashlib.sha256(data).hexdigest()[:16]


def norm(dtype, data):
    if dtype != "F32":
        return None
    values = data.cast("f")
    return math.sqrt(sum(map(operator.mul, values, values)))


def hashes(paths, prefix=""):
    """{name: {"hash", "norm"}} of the tensors whose names begin with the prefix."""
    return {name[len(prefix) :]: {"hash": short_hash(data), "norm": norm(dtype, data)}
            for name, dtype, data in tensors(paths) if name.startswith(prefix)}


def one_hash(paths):
    whole = hashlib.sha256()
    for name, dtype, data in tensors(paths):
        whole.update(f"{name} {dtype} ".encode())
        whole.update(data)
    return whole.hexdigest()[:16]
