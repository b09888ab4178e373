"""The examples run, and show what they say."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


def run(*words):
    return subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True, text=True, timeout=300).stdout


def test_simulate_cluster(tmp_path):
    text = run(EXAMPLES / "simulate_cluster.py", "--steps", 2, "--out", tmp_path / "schedule.svg")
    before, after = map(float, re.search(r"([\d.]+) ms in order, ([\d.]+) ms balanced", text).groups())
    assert after < before and (tmp_path / "schedule.svg").read_text().startswith("<svg")


def test_megatron_loop():
    assert "a resumed sampler goes on" in run(EXAMPLES / "megatron_loop.py")


def on_two_processes(script, *words):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    return run("-m", "torch.distributed.run", "--nproc-per-node", 2, script, *words)


def test_finetune_on_two_processes():
    text = on_two_processes(EXAMPLES / "finetune.py", "--sequences", 64, "--longest", 512)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.M)]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_comparison_of_samplers_on_two_processes():
    script = EXAMPLES.parents[1] / "bench" / "peers" / "balanced_sampler.py"
    text = on_two_processes(script, "--sequences", 32, "--longest", 512, "--micro-batch", 4)
    found = re.findall(r"^(\w+), 2 micro-batches: .* at most (\S+) apart", text, re.M)
    apart = {way: float(difference) for way, difference in found}
    assert set(apart) == {"batch_rebalance", "group_by_length", "random"}
    assert apart["batch_rebalance"] < 2e-5 and apart["random"] < 2e-5  # the same global batches
    assert len(re.findall(r"^\| 2 \| `", text, re.M)) == 4
