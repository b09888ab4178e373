"""Shows that the record can find what it is for: the comparison, and what is read from the program's files."""

import copy
import json
import pathlib
import struct
import tempfile

from results import commands, compare, memory_plans, settings, tensors, trainings
from results.case import RecordError, flat

HEADER = {"commit": "0000000", "program": "a", "cases by": "c",
          "must agree": {"kernels": "AVX2", "matmuls": "OpenBLAS for Haswell", "compiler": "g"}}
RECORD = {"header": HEADER, "cases": {
    "layouts/dp2/dense": {"step 1/loss": 4.0, "gradient/a/hash": "12", "plan.jsonl": []},
    "layouts/one-rank/dense": {"step 1/loss": 4.0, "exit": True}}}


def changed(**values):
    """The record with other values: {case's short name: {key: value}}."""
    other = copy.deepcopy(RECORD)
    for case, items in values.items():
        other["cases"][f"layouts/{case.replace('_', '-')}/dense"].update(items)
    return other


def fails(call, part):
    try:
        call()
    except RecordError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"no error that says '{part}'")


def comparison():
    lines, good = compare.report(RECORD, copy.deepcopy(RECORD))
    assert good and lines == ["2 cases, 5 values compared: 0 differences in 0 cases"], lines
    # The last bit of a loss; a hash; a type; a key more; a key less; a case less.
    nearest = 4.000000000000001
    lines, good = compare.report(RECORD, changed(dp2={"step 1/loss": nearest}))
    expected = "layouts/dp2/dense: step 1/loss: 4.0 -> 4.000000000000001 (relative 2.2e-16"
    assert not good and lines[0].startswith(expected), lines
    for values, text in [({"gradient/a/hash": "13"}, "gradient/a/hash: '12' -> '13'"),
                         ({"exit": 1}, "exit: '(not there)' -> 1"), ({"plan.jsonl": {}}, "plan.jsonl: [] -> {}")]:
        lines, good = compare.report(RECORD, changed(dp2=values))
        assert not good and lines[0] == f"layouts/dp2/dense: {text}" and len(lines) == 2, lines
    lines, good = compare.report(RECORD, changed(one_rank={"exit": 1}))
    assert not good and lines[0] == "layouts/one-rank/dense: exit: True -> 1", lines
    shorter = changed()
    del shorter["cases"]["layouts/dp2/dense"]
    lines, good = compare.report(RECORD, shorter)
    assert not good and lines[0] == "layouts/dp2/dense: all of it: only in the first record", lines
    lines, good = compare.report(RECORD, shorter, only="layouts/one")
    assert good and lines == ["1 cases, 2 values compared: 0 differences in 0 cases"], lines
    fails(lambda: compare.report(RECORD, RECORD, only="nothing"), "neither record has a case")


def refusals():
    for key, value in [("kernels", "AVX-512"), ("matmuls", "OpenBLAS for Zen"), ("OPENBLAS_L2_SIZE", "512")]:
        other = changed()
        other["header"]["must agree"][key] = value
        fails(lambda: compare.report(RECORD, other), f"cannot be compared: {key} is ")
    other = changed()
    other["header"]["cases by"] = "d"
    fails(lambda: compare.report(RECORD, other), "different versions of scripts/results")


def reasons():
    other = changed(dp2={"step 1/loss": 4.5, "gradient/a/hash": "13"})
    patterns = compare.intended("# why\nlayouts/dp*: step*/loss -- sums in fp32\n")
    lines, good = compare.report(RECORD, other, patterns=patterns)
    expected = "intended (sums in fp32): 1 values, such as layouts/dp2/dense: step 1/loss"
    assert not good and lines[0].startswith(expected), lines
    assert lines[1].startswith("layouts/dp2/dense: gradient/a/hash") and len(lines) == 3, lines
    patterns += compare.intended("*: gradient/* -- the same")
    assert compare.report(RECORD, other, patterns=patterns)[1]
    lines, good = compare.report(RECORD, RECORD, patterns=patterns[:1])
    assert not good and lines[0].startswith("intended, but there is no such difference"), lines
    fails(lambda: compare.intended("layouts/*"), "line 1 of the intended differences")


def readings():
    assert flat({"a": {"b": [1, {"c": None}]}, "d": {}}) == {"a/b/0": 1, "a/b/1/c": None, "d": {}}
    # Values of 3 and 4 have norm 5; another bit gives another hash.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.safetensors"
        for last in (4.0, -4.0):
            index = json.dumps({"__metadata__": {}, "exp_avg.w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                                "exp_avg_sq.w": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}).encode()
            path.write_bytes(struct.pack("<Q", len(index)) + index + struct.pack("<3f", 3.0, last, 1.0))
            found = tensors.hashes([path], "exp_avg.")
            assert list(found) == ["w"] and found["w"]["norm"] == 5.0, found
            assert (found["w"]["hash"] == tensors.short_hash(struct.pack("<2f", 3.0, 4.0))) == (last == 4.0)
    assert trainings.is_timed("step_ms") and trainings.is_timed("measured_makespan_ms")
    untimed = ("loss", "predicted_step_ms", "worker_imbalance", "lower_bound_ms", "density")
    assert not any(map(trainings.is_timed, untimed))
    plan = ("layout\n  1 process\n\nmemory plan per rank of stage 1\n  packed keys and values of pieces   160.00 GiB\n"
            "  total     1.33 TiB  of 3.30 GiB available\nestimate   about 1 s\n  a  2 GiB\n")
    assert memory_plans.printed_plans(plan) == {"stage 1": {"packed keys and values of pieces": "160.00 GiB",
                                                            "total": "1.33 TiB"}}
    table = "policy   max loss planner ms\nsab        9.8%      0.544\n1 x 2  yes"
    assert commands.without_planner_times(table) == ["policy   max loss", "sab        9.8%", "1 x 2  yes"]
    assert settings.nested({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert settings.layout_name((2, 1, 3, 1)) == "dp2-cp3" and settings.layout_name((1, 1, 1, 1)) == "one-rank"


def names():
    found = [case.name for part in (trainings, commands, memory_plans) for case in part.cases()]
    assert len(found) == len(set(found)), "two cases of one name"
    assert len(memory_plans.CONFIGURATIONS) == 20


def run():
    for part in (comparison, refusals, reasons, readings, names):
        part()
    print("record-results: finds what it should")
    return 0
