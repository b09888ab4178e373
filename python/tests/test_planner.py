"""Plans: what they hold, that they are pure, and that they are the command line tool's own."""

import json
import multiprocessing
import pickle
import threading

import numpy as np
import pytest

import sparsebalance as sb

LENGTHS = [30000, 900, 1200, 17000, 4000, 64000, 128, 2500]


def make_planner(**changes):
    options = dict(dp=2, micro_batch_sequences=2, attention=sb.AttentionSpec(budget=4096))
    return sb.Planner("qwen2.5-3b", **{**options, **changes})


def test_every_sequence_runs_once_and_budgets_have_a_row_a_layer():
    planner = make_planner()
    plan = planner.plan(7, LENGTHS)
    assert plan.step == 7 and plan.layers == planner.layers == 36 and len(plan.ranks) == 2
    seen = []
    for rank in plan.ranks:
        for micro_batch in rank.micro_batches:
            assert micro_batch.piece is None
            assert micro_batch.tokens == sum(LENGTHS[i] for i in micro_batch.sequences)
            assert micro_batch.budgets.dtype == np.int32
            assert micro_batch.budgets.shape == (36, len(micro_batch.sequences))
            seen += micro_batch.sequences
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert 0 < plan.lower_bound_us <= plan.makespan_us <= plan.baseline_us


def test_budgets_are_the_configured_one_unless_tuning_is_asked_for():
    def budgets(planner):
        micro_batches = [m for rank in planner.plan(1, LENGTHS).ranks for m in rank.micro_batches]
        return {i: m.budgets[:, k] for m in micro_batches for k, i in enumerate(m.sequences)}

    for i, layers in budgets(make_planner()).items():
        assert set(layers.tolist()) == {min(LENGTHS[i], 4096)}  # short sequences run dense
    assert any(len(set(layers.tolist())) > 1 or layers[0] != min(LENGTHS[i], 4096)
               for i, layers in budgets(make_planner(tuning="optimal")).items())  # fmt: skip


def test_the_same_step_and_lengths_give_the_same_plan():
    planner = make_planner()
    first = planner.plan(1, LENGTHS)
    planner.plan(2, LENGTHS[::-1])
    assert planner.plan(1, np.array(LENGTHS)).to_json() == first.to_json()
    assert make_planner(threads=3).plan(1, LENGTHS).to_json() == first.to_json()


def test_long_sequences_come_in_pieces_where_asked_for():
    plan = make_planner(pp=4, chunk=8192, micro_batch_sequences=1).plan(1, LENGTHS)
    pieces = [m.piece for rank in plan.ranks for m in rank.micro_batches if m.sequences == [5]]
    assert pieces[0][0] == 0 and pieces[-1][1] == 64000
    assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:]))
    assert max(end - begin for begin, end in pieces) <= 8192


def test_what_is_observed_changes_later_plans_and_survives_in_the_state():
    planner = make_planner()
    plan = planner.plan(1, LENGTHS)
    times = [
        [[(2 * f / 1e3, 3 * b / 1e3) for f, b in zip(m.forward_us, m.backward_us)] for m in rank.micro_batches]
        for rank in plan.ranks
    ]
    before = planner.state_dict()
    planner.observe(plan, LENGTHS, times)
    slower = planner.plan(2, LENGTHS)
    assert slower.makespan_us > 1.2 * plan.makespan_us
    restored = make_planner()
    restored.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert restored.plan(2, LENGTHS).to_json() == slower.to_json()
    planner.load_state_dict(before)
    assert planner.plan(1, LENGTHS).to_json() == plan.to_json()


def test_plans_go_through_text_and_pickle():
    plan = make_planner().plan(3, LENGTHS)
    for copy in (sb.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert copy == plan and copy.to_json() == plan.to_json()
    assert plan != make_planner().plan(4, LENGTHS) and plan != "plan"
    with pytest.raises(sb.UserError, match="read from text"):
        sb.Plan.from_json(plan.to_json()).operations()


def test_schedules_as_operations_and_pictures():
    plan = make_planner(pp=2).plan(1, LENGTHS)
    operations = plan.operations()
    micro_batches = sum(len(rank.micro_batches) for rank in plan.ranks)
    assert len(operations) == micro_batches * 2 * 2  # stages, directions
    assert all(o.end > o.start >= 0 for o in operations)
    assert max(o.end for o in operations) <= plan.makespan_us * (1 + 1e-9)
    assert plan._repr_svg_().startswith("<svg") and "before" in sb.svg([("before", plan), ("after", plan)])
    assert json.loads(plan.trace())


@pytest.mark.parametrize(
    ("changes", "lengths", "message"),
    [
        ({"batching": "best"}, LENGTHS, "batching: unknown value best; choose from in_order"),
        ({"tuning": "x"}, LENGTHS, "tuning: unknown value x"),
        ({"profile": "z80"}, LENGTHS, "z80"),
        ({"target": 2.0}, LENGTHS, "target"),
        ({"chunk": 100}, LENGTHS, "multiple of 128"),
        ({"chunk": "large"}, LENGTHS, "chunk"),
        ({"micro_batch_sequences": None}, LENGTHS, "the size of a micro-batch is not set"),
        ({"p": 1.0}, LENGTHS, "p must be in"),
        ({"coverage": "power:1.5"}, LENGTHS, "power coverage"),
        ({"threads": 0}, LENGTHS, "threads"),
        ({}, [], "empty"),
        ({}, [5], "smaller than dp"),
        ({}, [5, 0], "lengths must be positive"),
    ],
)
def test_wrong_arguments_are_named(changes, lengths, message):
    with pytest.raises(sb.UserError, match=message):
        make_planner(**changes).plan(1, lengths)
    assert issubclass(sb.UserError, ValueError)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": -1}, "budget -1 is not in 1 to"),
        ({"budget": 0}, "budget 0"),
        ({"budget": 1 << 31}, "budget 2147483648"),
        ({"block": 0}, "block 0"),
        ({"query_block": -16}, "query_block -16"),
        ({"score_tokens": 48}, "score_tokens 48 does not divide block 128"),
        ({"sink_blocks": -1}, "sink_blocks -1"),
        ({"local_blocks": -2}, "local_blocks -2"),
        ({"dense_below": -2}, "dense_below -2"),
        ({"max_budget": -1}, "max_budget -1"),
        ({"max_budget": 4096}, "max_budget 4096 is below budget 8192"),
        ({"dense_layers": [0, -1]}, "dense_layers: there is no layer -1"),
    ],
)
def test_attention_that_no_plan_could_use_is_refused_at_once(wrong, message):
    with pytest.raises(sb.UserError, match=message):
        sb.AttentionSpec(**wrong)


def test_damaged_text_is_refused():
    planner = make_planner()
    for state in ("", "{}", '{"version":1,"states":[]}'):
        with pytest.raises(sb.UserError, match="planner's state"):
            planner.load_state_dict({"balance": state})
    with pytest.raises(sb.UserError, match="the text"):
        sb.Plan.from_json("{}")


def plan_text(planner, queue):
    queue.put(planner.plan(1, LENGTHS).to_json())


def test_a_forked_worker_plans_with_its_parents_planner():
    planner = make_planner(threads=2)
    expected = planner.plan(1, LENGTHS).to_json()  # its threads are running now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=plan_text, args=(planner, queue))
    worker.start()
    assert queue.get(timeout=60) == expected
    worker.join(60)
    assert worker.exitcode == 0


def test_threads_share_a_planner():
    planner = make_planner(threads=2)
    expected = planner.plan(1, LENGTHS).to_json()
    plans = []
    threads = [
        threading.Thread(target=lambda: plans.extend(planner.plan(1, LENGTHS).to_json() for _ in range(5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plans == [expected] * 20


def test_plans_are_those_of_the_command_line_tool_byte_for_byte(run_directory, small_model):
    lines = [json.loads(line) for line in (run_directory / "plan.jsonl").read_text().splitlines()]
    texts = (run_directory / "plan.jsonl").read_text().splitlines()
    planned = [(line, text) for line, text in zip(lines, texts) if "plan" in line]
    assert len(planned) == 3
    planner = sb.Planner(
        small_model,
        dp=2,
        micro_batch_sequences=1,
        micro_batch_tokens=2048,  # what the tool makes of its longest sequence
        max_sequences=8,
        tuning="optimal",
        attention=sb.AttentionSpec(block=64, budget=512, local_blocks=1, max_budget=2048),
        precision="float32",  # of a run on a CPU
    )
    for line, text in planned:
        lengths = {}
        for rank in line["in_order"]["ranks"]:  # one sequence a micro-batch there
            for micro_batch in rank["micro_batches"]:
                lengths[micro_batch["sequences"][0]] = micro_batch["tokens"]
        assert len(lengths) == 8
        ids = sorted(lengths)
        plan = json.loads(planner.plan(line["step"], [lengths[i] for i in ids]).to_json())
        for rank in plan["ranks"]:  # the tool counts sequences over the whole run
            for micro_batch in rank["micro_batches"]:
                micro_batch["sequences"] = [ids[i] for i in micro_batch["sequences"]]
        assert json.dumps(plan, separators=(",", ":")) in text
