"""The simulator gives what the command line tool gives."""

import json

import pytest

import sparsebalance as sb


def test_rows_are_those_of_the_command_line_tool(program, tmp_path):
    policies = ["in_order", "sab+order+optimal", "sab+order+chunk+optimal"]
    program(
        "simulate", "--dp", 2, "--pp", 2, "--tp", 2, "--steps", 5, "--global-batch", 8, "--policies", ",".join(policies), "--json",
        tmp_path / "rows.json",
    )  # fmt: skip
    expected = json.loads((tmp_path / "rows.json").read_text())["rows"]
    rows = sb.simulate(dp=2, pp=2, tp=2, steps=5, global_batch=8, policies=policies)
    assert [row.policy for row in rows] == policies
    for row, other in zip(rows, expected):
        for name in ("speedup", "makespan_ms", "imbalance", "bubble_share", "mean_coverage", "min_coverage", "worst_loss"):
            assert getattr(row, name) == other[name], name
    table = rows.to_pandas()
    assert list(table["speedup"]) == [row["speedup"] for row in expected]


def test_layouts_are_those_of_the_command_line_tool(program, tmp_path):
    policy = "sab+order+chunk+optimal"
    program("simulate", "--sweep", "--gpus", 4, "--steps", 2, "--policies", policy, "--json", tmp_path / "rows.json")
    expected = json.loads((tmp_path / "rows.json").read_text())["layouts"]
    table = sb.sweep(4, steps=2).to_pandas()
    assert table.to_dict("records") == [{key: row[key] for key in table.columns} for row in expected]


def test_all_policies_where_none_is_named():
    rows = sb.simulate([1000, 2000, 3000, 40000], steps=1, global_batch=4, dp=2)
    assert len(rows) > 10 and rows[0].policy == "in_order" and rows[0].speedup == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ["fastest"]}, "fastest"),
        ({"lengths": []}, "no lengths"),
        ({"lengths": [0]}, "positive"),
        ({"lengths": "no-such-pool"}, "no-such-pool"),
        ({"steps": 0}, "steps"),
        ({"tp": 4}, "2 key/value heads"),
        ({"dp": 32}, "smaller than dp"),
        ({"model": "gpt-17"}, "gpt-17"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(sb.UserError, match=message):
        sb.simulate(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sb.simulate(dpp=8), r"simulate\(\) got an unexpected keyword argument 'dpp'; did you mean 'dp'\?"),
        (lambda: sb.simulate(policy="in_order"), "did you mean 'policies'"),
        (lambda: sb.simulate(lengths_of=[5]), "did you mean 'lengths'"),
        (lambda: sb.simulate(zzz=1), "'zzz'; there are lengths, policies, model, .*threads"),
        (lambda: sb.sweep(4, maxcp=8), r"sweep\(\) got an unexpected keyword argument 'maxcp'; did you mean 'max_cp'"),
    ],
)
def test_unknown_keywords_are_named_with_what_may_be_meant(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_lengths_of_a_pool_a_file_and_a_list(tmp_path):
    (tmp_path / "lengths.txt").write_text("5\n# none\n7\n")
    assert sb.lengths(tmp_path / "lengths.txt") == [5, 7]
    assert sb.lengths([5, 7], max_length=6) == [5, 6]
    assert min(sb.lengths("chatqa2-like")) > 0
