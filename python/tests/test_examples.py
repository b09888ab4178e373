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


def test_finetune_on_two_processes():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    text = run("-m", "torch.distributed.run", "--nproc-per-node", 2, EXAMPLES / "finetune.py", "--sequences", 16, "--longest", 512)
    losses = dict(re.findall(r"^(\w+) .* loss ([\d.]+)$", text, re.M))
    assert float(losses["balanced"]) == pytest.approx(float(losses["batch_rebalance"]), abs=2e-5)
    assert text.count("times as fast as") == 2
