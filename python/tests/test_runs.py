"""What a run of the command line tool leaves behind, read back."""

import json
import subprocess
import sys

import pytest

import sparsebalance as sb


def test_metrics(run_directory):
    metrics = sb.read_metrics(run_directory)
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert metrics["loss"] == losses and set(losses) == {1, 2, 3} and metrics.skipped == 0
    table = metrics.to_pandas()
    assert table.loc[2, "loss"] == losses[2]


def test_plans(run_directory):
    plans = sb.read_plans(run_directory)
    assert sorted(plans) == [1, 2, 3] and plans.damage == ""
    step = plans[2]
    assert step.plan.step == 2 and step.in_order is not None and step.measured_step_us > 0
    table = plans.to_pandas()
    lines = [json.loads(line) for line in (run_directory / "plan.jsonl").read_text().splitlines()]
    ranks = [rank for line in lines if "plan" in line for rank in line["plan"]["ranks"]]
    assert len(table) == sum(len(rank["micro_batches"]) for rank in ranks) and (table["measured_forward_us"] > 0).all()


def test_a_run_without_plans_was_not_balanced(run_directory, tmp_path):
    (tmp_path / "metrics.jsonl").write_text((run_directory / "metrics.jsonl").read_text())
    assert sb.read_metrics(tmp_path)
    with pytest.raises(sb.UserError, match="plan.jsonl: there is no such file; a run has one when it is balanced"):
        sb.read_plans(tmp_path)


def test_a_damaged_log_ends_where_the_damage_is(run_directory, tmp_path):
    text = (run_directory / "plan.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "plan.jsonl").write_text(text[0] + '{"step":')
    plans = sb.read_plans(tmp_path)
    assert list(plans) == [1] and "line 2" in plans.damage


def test_report(run_directory, tmp_path, program):
    html = sb.report(run_directory, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == html and html.startswith("<!")
    program("report", run_directory, "--out", tmp_path / "own.html")
    assert (tmp_path / "own.html").read_text() == html
    with pytest.raises(sb.UserError, match="no plan of step 99"):
        sb.report(run_directory, step=99)
    with pytest.raises(sb.UserError, match="metrics.jsonl"):
        sb.report(tmp_path)


def test_profiles(tmp_path):
    assert "h200" in sb.profiles() and "h200-analytic" in sb.profiles()
    profile = sb.profile("h200", "qwen2.5-3b")
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert sb.profile(tmp_path / "profile.json", "qwen2.5-3b")["machine"] == profile["machine"]
    with pytest.raises(sb.UserError):
        sb.profile(tmp_path / "missing.json")


def test_the_package_imports_neither_torch_nor_pandas():
    code = "import sys, sparsebalance; print([m for m in ('torch', 'transformers', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_program_is_in_the_package(program):
    assert program("--version") == f"sparsebalance {sb.__version__} ({sb.__build__})\n"
