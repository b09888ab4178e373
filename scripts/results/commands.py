"""Recorded commands: those of docs/results that end within a minute on a CPU and print more than times, and evaluation.

Not here, because all they print are times or they take longer: bench_engine, bench_ops, bench_attention, bench_balance,
bench_pieces, bench_comm, bench/quality and tests/faults."""

import json
import re

from results.case import Case, RecordError, flat, refusal, run, without_times
from results.settings import PATTERNS
from results.tensors import short_hash
from results.trainings import train

SIMULATE = {
    "--model": "qwen2.5-3b", "--profile": "h200-analytic", "--lora": 0, "--coverage": "power:0.22",
    "--lengths": "chatqa2-like", "--dp": 1, "--pp": 1, "--tp": 1, "--cp": 1, "--warmup-depth": 1, "--comm": "on",
    "--head": "on", "--micro-batch-sequences": 1, "--global-batch": 16, "--budget": 8192, "--block": 128,
    "--query-block": 16, "--pattern": "mass", "--score": "planes", "--score-channels": 32, "--score-tokens": 0,
    "--max-budget": 0, "--p": 0.1, "--chunk": "auto", "--steps": 200, "--seed": 1, "--threads": 1,
}
RING = {"--cp": 32, "--node-size": 8, "--ring-tokens": 524288, "--slash-density": 0.046, "--verticals": 500,
        "--block": 128, "--ring-times": "0.51,0.13,0.98"}
ATTENTION = {"--heads": 14, "--kv-heads": 2, "--head-dim": 64, "--block": 128, "--query-block": 16, "--pattern": "topk",
             "--selection": "causal", "--score": "planes", "--score-tokens": 0, "--score-channels": 32, "--threads": 1,
             "--repeats": 1}
MAIN_POLICIES = "in_order,sab+anchor:mean,sab+order+optimal,sab+order+chunk,sab+order+chunk+optimal"
PIECE_POLICIES = "in_order,sab+order,sab+order+optimal,sab+order+chunk,sab+order+chunk+optimal"
PAPER_POLICIES = "in_order,sab+anchor:mean,sab+order+optimal"


# What is given to each command, over all cases: an option that a program does not have is left out and listed once, in
# the case `settings`.
WRITTEN = {
    "simulate": {*SIMULATE, *RING, "--ring", "--sweep", "--gpus", "--max-cp", "--max-tp", "--max-length",
                 "--micro-batch-tokens", "--policies", "--no-frontier", "--json"},
    "bench attention": {*ATTENTION, "--seq", "--density", "--json"},
}


def words(program, command, options):
    """The command line with the options that the program has, less one that it refuses where it has no effect."""
    unused = {"--score-channels"} if options.get("--score") not in ("planes", None) else set()
    known = program.arguments[command] - unused
    pairs = [[name, value] for name, value in options.items() if name in known]
    return [program.path, *command.split(), *(word for pair in pairs for word in pair if word is not None)]


def by_policy(found):
    """Rows by the name of their policy: one more of them does not move the others."""
    def named(row, number):
        layout = " x ".join(str(row[kind]) for kind in ("dp", "pp", "tp", "cp") if kind in row)
        return row.get("policy") or layout or str(number)

    return {key: {named(row, number): row for number, row in enumerate(value)}
            if isinstance(value, list) and value and all(isinstance(row, dict) for row in value) else value
            for key, value in found.items()}


def without_planner_times(text):
    """The printed table without its last column, the time that planning took."""
    return [re.sub(r"\s+(planner ms|[0-9.]+)$", "", line) if "planner ms" in line or re.search(r"%\s+[0-9.]+$", line)
            else line for line in text.splitlines()]


def simulation(options, timed=True):
    def record(program, folder):
        code, text, errors = run(words(program, "simulate", options), folder)
        if code != 0:
            return refusal(code, errors)
        found = {"printed": without_planner_times(text) if timed else text.splitlines()}
        written = folder / "out.json"
        if written.exists():
            rows = json.loads(written.read_text(encoding="utf-8"))
            found.update(by_policy(without_times(rows, lambda key: key == "planner_ms")))
        return flat(found)

    return record


def simulate(**own):
    options = {f"--{name.replace('_', '-')}": value for name, value in own.items()}
    return simulation({**SIMULATE, "--no-frontier": None, **options, "--json": "out.json"})


def frontier(**own):
    """With what is printed by deadline and by p."""
    options = {f"--{name.replace('_', '-')}": value for name, value in own.items()}
    return simulation({**SIMULATE, **options, "--json": "out.json"})


def sweep(gpus, policies, **own):
    options = {f"--{name.replace('_', '-')}": value for name, value in own.items()}
    layouts = {"--sweep": None, "--gpus": gpus, "--max-cp": 8, "--max-tp": 8, "--policies": policies}
    base = {key: value for key, value in SIMULATE.items() if key not in ("--dp", "--pp", "--tp", "--cp")}
    return simulation({**base, **layouts, **options, "--json": "out.json"})


def simulations():
    published = {"comm": "off", "head": "off", "block": 256}
    found = {
        "simulate.md/one-node": frontier(**published, dp=2, pp=4, micro_batch_sequences=2, pattern="topk",
                                         score="moments"),
        "simulate.md/sixteen": frontier(**published, dp=4, pp=4, pattern="topk", score="moments"),
        "simulate-h200.md/one-node": frontier(**published, profile="h200", dp=2, pp=4, micro_batch_sequences=2),
    }
    for lengths in ("chatqa2-like", "longalign-like"):
        found[f"simulate-h200.md/{lengths}"] = simulate(**published, profile="h200", lengths=lengths, dp=4, pp=4,
                                                        policies=PIECE_POLICIES)
        found[f"simulate-h200.md/{lengths}-counted"] = simulate(profile="h200", lengths=lengths, block=256, dp=4, pp=4,
                                                                policies=PIECE_POLICIES)
        for model in ("qwen2.5-3b", "qwen2.5-0.5b"):
            for profile in ("h200", "h200-analytic"):
                for tp in (1, 2):
                    found[f"simulate-paper-layouts.md/{model}-{lengths}-{profile}-tp{tp}"] = simulate(
                        model=model, profile=profile, lengths=lengths, dp=4, pp=4, tp=tp, policies=MAIN_POLICIES)
            found[f"simulate-paper-layouts.md/policies-{model}-{lengths}"] = frontier(**published, model=model,
                                                                                      lengths=lengths, dp=4, pp=4)
    found["simulate-paper-layouts.md/policies-one-node"] = frontier(**published, dp=2, pp=4, micro_batch_sequences=2)
    for model in ("qwen2.5-3b", "qwen2.5-14b", "qwen2.5-32b"):
        for gpus in (8, 32, 64):
            for policy in ("sab+order+optimal", "sab+order+chunk+optimal"):
                found[f"simulate-paper-layouts.md/sweep-{model}-{gpus}-{policy}"] = sweep(gpus, policy, model=model,
                                                                                          block=256, steps=20)
    paper = {"dp": 4, "pp": 4, "tp": 2, "policies": PAPER_POLICIES}
    for name, own in {"h20-chatqa2": {"profile": "h20-analytic"},
                      "h20-longalign": {"profile": "h20-analytic", "lengths": "longalign-like"},
                      "adapters": {"profile": "h200", "lora": 32}, "p-0.2": {"profile": "h200", "p": 0.2},
                      "p-0.3": {"profile": "h200", "p": 0.3}}.items():
        found[f"papers.md/{name}"] = simulate(**paper, **own)
    for lengths, longest, gpus in (("chatqa2-like", 32768, 8), ("longalign-like", 65536, 16)):
        for policy in ("in_order", "sab+order+chunk", "sab+order+chunk+optimal"):
            found[f"best-layout.md/{lengths}-{policy}"] = sweep(gpus, policy, profile="h200", lengths=lengths, steps=40,
                                                                max_length=longest, micro_batch_tokens=longest)
    found["balancing.md/layered"] = simulate(coverage="layered", dp=2, pp=4, micro_batch_sequences=2,
                                             policies=MAIN_POLICIES, steps=50)
    return found


def half_a_million_tokens(profile):
    def record(program, folder):
        (folder / "lengths.txt").write_text("524288\n", encoding="utf-8")
        return simulate(profile=profile, lengths="lengths.txt", cp=32, budget=13312, global_batch=4, steps=2,
                        policies="in_order")(program, folder)

    return record


def rings():
    small = {"--cp": 16, "--node-size": 4, "--ring-tokens": 131072, "--ring-times": "2,0.2,1.5"}
    return {"ring.md/published": simulation({"--ring": None, **RING}, timed=False),
            "parallel.md/ring-of-16": simulation({"--ring": None, **RING, **small}, timed=False)}


def bench_attention(**own):
    """Which share of the pairs is computed; all else is a time."""
    given = {f"--{name.replace('_', '-')}": value for name, value in own.items()}
    options = {**ATTENTION, **given, "--json": "out.json"}

    def record(program, folder):
        code, _, errors = run(words(program, "bench attention", options), folder)
        if code != 0:
            return refusal(code, errors)
        rows = json.loads((folder / "out.json").read_text(encoding="utf-8"))["rows"]
        return {f"row {number}/{key}": row[key] for number, row in enumerate(rows) for key in ("tokens", "density")}

    return record


def bench_attentions():
    page = {f"attention-cpu.md/{score}": bench_attention(seq=16384, density=0.1, score=score)
            for score in ("planes", "moments")}
    page["attention-cpu.md/everything"] = bench_attention(seq=4096, density=1.0)
    patterns = {f"bench/{pattern}-{order}-{score}": bench_attention(seq=2048, density=0.25, pattern=pattern,
                                                                    score=score, selection=order)
                for pattern in ("topk", "mass", "topp") for order in ("causal", "lookahead")
                for score in ("planes", "moments", "mean")}
    others = {"bench/vertical_slash": bench_attention(seq=2048, density=0.25, pattern="vertical_slash",
                                                      selection="lookahead"),
              "bench/window": bench_attention(seq=2048, density=0.25, pattern="window")}
    return {**page, **patterns, **others}


def own_program(name, arguments, keep):
    """A benchmark beside the program, which has to be built: lines without times."""

    def record(program, folder):
        built = program.path.parents[2] / "bench" / name
        if not built.exists():
            raise RecordError(f"{built} is not there: build the target {built.name} in the program's folder (preset dev)")
        code, text, errors = run([built, *arguments], folder)
        return refusal(code, errors) if code != 0 else flat({"printed": keep(text)})

    return record


def benchmarks():
    """Planning: its speed-ups. Memory of a ring: bytes planned and used."""
    speedups = lambda text: [re.sub(r": without tuning.*, speed-up", ": speed-up", line)
                             for line in text.splitlines() if "speed-up" in line]
    return {"simulate-planner.md/speed-ups": own_program("plan/planner_bench", ["1"], speedups),
            "ring.md/memory": own_program("parallel/bench_ring_memory", ["4096"], str.splitlines)}


def written_by(command, output):
    """A file that a command of `data` writes."""

    def record(program, folder):
        code, text, errors = run([program.path, *command], folder)
        if code != 0:
            return refusal(code, errors)
        files = sorted(folder.glob(f"{output}*"))
        return {**{f"{path.suffix[1:]} file": short_hash(path.read_bytes()) for path in files}, "printed": text}

    return record


def tasks():
    names = ("chunk_recall", "copy", "needle_single", "needle_multi_key", "needle_multi_value", "needle_multi_query",
             "variable_tracking", "common_words", "frequent_words", "associative_recall")
    synth = ["data", "synth", "--sequences", "20", "--length", "512", "--min-length", "256", "--seed", "1",
             "--vocab-size", "256", "--chunk", "8", "--needles", "4", "--values", "4", "--queries", "2",
             "--value-tokens", "1", "--hops", "4", "--chains", "2", "--answers", "4", "--depth", "-1", "--min-distance",
             "-1"]
    found = {f"data/{name}": written_by([*synth, "--task", name, "--output", "out"], "out") for name in names}
    for pool in ("chatqa2-like", "longalign-like"):
        lengths = ["data", "lengths", "--pool", pool, "--count", "1000", "--seed", "1", "--output", "out.txt"]
        found[f"data/lengths-{pool}"] = written_by(lengths, "out")
    return found


TEXT = [(7 * i * i + 3 * i) % 64 for i in range(700)]
EVALUATED = ("--max-tokens", "1000", "--threads", "1", "--device", "cpu", "--precision", "float32")
REQUESTS = [{"score": {"tokens": TEXT[:n], "targets": k}} for n, k in ((20, 1), (300, 7), (650, 64), (700, 699))] + \
           [{"generate": {"prompts": [TEXT[:n], TEXT[5 : n + 100]], "max_new_tokens": 12}} for n in (10, 320, 580)]


def answers(program, folder, attention):
    """`eval serve`: log-likelihoods, and tokens generated from the cache. Generation asks after every token whether to
    go on; a `true` too many is answered as a wrong request, which is not kept."""
    go_on = "true\n" * 2 * 12
    given = "".join(json.dumps(request) + "\n" + (go_on if "generate" in request else "") for request in REQUESTS)
    command = [program.path, "eval", "serve", "--model", "run/final", "--attention", attention, *EVALUATED]
    code, text, errors = run(command, folder, given=given)
    if code != 0:
        return refusal(code, errors)
    lines = [json.loads(line) for line in text.splitlines()]
    return {f"answer {number}": line
            for number, line in enumerate(line for line in lines if "loglikelihood" in line or "tokens" in line)}


def evaluation(own, attention):
    """A model after two steps with a pattern: its perplexity, by position, and its answers."""

    def record(program, folder):
        refused = train(program, folder, own)
        if refused:
            return refused
        made = run([program.path, "data", "synth", "--task", "copy", "--output", "text", "--sequences", "3", "--length",
                    "900", "--min-length", "300", "--vocab-size", "64", "--chunk", "4", "--seed", "2"], folder)
        command = [program.path, "eval", "ppl", "--model", "run/final", "--attention", attention, *EVALUATED]
        code, _, errors = run([*command, "--data", "text", "--sequences", "0", "--json", "ppl.json"], folder)
        if made[0] != 0 or code != 0:
            return refusal(max(made[0], code), made[2] + errors)
        found = {"perplexity": json.loads((folder / "ppl.json").read_text(encoding="utf-8")),
                 "serve": answers(program, folder, attention)}
        return flat(without_times(found, lambda key: re.search(r"second|_ms$|threads", key)))

    return record


def evaluations():
    return {f"evaluation/{name}-{attention}": evaluation(own, attention)
            for name, own in PATTERNS.items() for attention in ("as-trained", "dense")
            if attention == "as-trained" or name in ("mass-planes", "window")}


def cases():
    groups = {**simulations(), **rings(), **bench_attentions(), **benchmarks(), **tasks()}
    found = {f"commands/{name}": make for name, make in groups.items()}
    found.update({f"commands/papers.md/512K-{profile}": half_a_million_tokens(profile)
                  for profile in ("a100-analytic", "h200-analytic")})
    found.update(evaluations())
    return [Case(name, make) for name, make in found.items()]
