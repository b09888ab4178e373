"""Recorded trainings: losses of all layouts and patterns, gradients, plans, resumed runs."""

import json
import re
import shutil

from results.case import Case, flat, json_lines, refusal, run
from results.settings import (ADAPTERS, BASE, COLUMNS_AND_DIAGONALS, KINDS, LAYOUTS, MORE_LAYOUTS, MORE_PATTERNS,
                              PATTERNS, YARN, layout, layout_name, nested, ranks_of, scored_patterns, shaped_patterns)
from results.tensors import hashes, one_hash

# Of metrics.jsonl: what a clock says, or follows from it.
TIMED = re.compile(r"step_ms|tokens_per_second|(executed_)?gflops_per_second|mfu|executed_utilization|measured_.*|"
                   r"prediction_error.*|imbalance|rank_imbalance|bubble_percent|planning_.*")


def is_timed(key):
    return TIMED.fullmatch(key) is not None


def train(program, folder, own, name="run"):
    """Runs the base settings with a case's own. The program must know the latter: a refusal is on the record."""
    settings = {**program.known(BASE), **own, "train.output_dir": name}
    (folder / f"{name}.yaml").write_text(json.dumps(nested(settings)), encoding="utf-8")
    ranks = ranks_of({**BASE, **own})
    command = [program.path, "train", f"{name}.yaml", *(["--ranks", ranks] if ranks > 1 else [])]
    code, _, errors = run(command, folder)
    return None if code == 0 else refusal(code, errors)


def newest_checkpoint(output):
    return max(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def trained(output):
    """What a training leaves: metrics, gradients of its last step, weights, what it learned, plans."""
    lines = json_lines(output / "metrics.jsonl")
    checkpoint = newest_checkpoint(output)
    found = {f"step {line['step']}{' validation' if 'validation_loss' in line else ''}":
             {key: value for key, value in line.items() if key != "step" and not is_timed(key)}
             for line in lines}
    # One file, or one of every rank.
    found["gradient"] = hashes(checkpoint.glob("optimizer*.safetensors"), "exp_avg.")
    # Weights, adapters, what selection learned.
    found["saved"] = {what: one_hash(paths) for what in ("model", "adapter_model", "selection")
                      if (paths := sorted(checkpoint.glob(f"{what}*.safetensors")))}
    if (output / "coverage.json").exists():
        found["coverage.json"] = json.loads((output / "coverage.json").read_text(encoding="utf-8"))
    found["plan.jsonl"] = [line for line in json_lines(output / "plan.jsonl") if "measured" not in line]
    return found


def one_training(own):
    def record(program, folder):
        refused = train(program, folder, own)
        return flat(refused or trained(folder / "run"))

    return record


def resumed(own):
    """A run of four steps, and the same again from its checkpoint of step 2."""

    def record(program, folder):
        output = folder / "run"
        settings = {"train.max_steps": 4, "train.save_steps": 2, **own}
        refused = train(program, folder, settings)
        if refused:
            return refused
        whole = trained(output)
        for path in (output / "checkpoint-4", output / "final"):
            shutil.rmtree(path)
        refused = train(program, folder, settings)
        if refused:
            return refused
        again = trained(output)
        return flat({**again, "equal to the run that was not stopped": again == whole})

    return record


def pieces_of_sequences():
    whole = {f"{pattern}/one-rank/{tokens}": {**PATTERNS[pattern], "balance.chunk": tokens}
             for pattern in ("dense", "mass-planes", "mass-moments", "topk-planes", "topp-planes", "window")
             for tokens in (128, 448)}
    shared = {f"{pattern}/{layout_name(sizes)}/128": {**PATTERNS[pattern], **layout(**dict(zip(KINDS, sizes))),
                                                      "balance.chunk": 128}
              for pattern in ("dense", "mass-planes", "topk-planes", "window")
              for sizes in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 2, 1))}
    levels = {f"{pattern}/recompute-{level}": {**PATTERNS[pattern], "balance.chunk": 128, "train.recompute": level}
              for pattern in ("dense", "mass-planes") for level in ("none", "layer", "chunk")}
    return {**whole, **shared, **levels}


def rings():
    patterns = ("dense", "mass-planes", "topk-moments", "mass-lookahead", "vertical_slash", "window")
    placed = {f"{pattern}/cp3/{placement}": {**PATTERNS[pattern], **layout(cp=3), "parallel.placement": placement}
              for pattern in patterns for placement in ("striped", "shifted", "zigzag")}
    hierarchical = {f"{pattern}/cp4/machines-of-2": {**PATTERNS[pattern], **layout(cp=4), "parallel.node_size": 2}
                    for pattern in patterns}
    return {**placed, **hierarchical}


def models_and_memory():
    sparse = PATTERNS["mass-planes"]
    return {
        "llama": {**sparse, "model.init.model_type": "llama", "model.init.tie_word_embeddings": False},
        "qwen3": {**sparse, "model.init.model_type": "qwen3", "model.init.attention_bias": True},
        "one-key-value-head": {**sparse, "model.init.num_attention_heads": 3, "model.init.num_key_value_heads": 1,
                               "model.init.head_dim": 22},
        "head-dim-64": {**sparse, "model.init.num_attention_heads": 2, "model.init.num_key_value_heads": 1,
                        "model.init.head_dim": 64, "attention.score_channels": 32},
        "yarn": {**sparse, **YARN},
        "recompute-none": {**sparse, "train.recompute": "none"},
        "recompute-layer": {**sparse, "train.recompute": "layer"},
        "vertical_slash-recompute-layer": {**PATTERNS["vertical_slash"], "train.recompute": "layer"},
        "sequence_mean": {**sparse, "batch.loss": "sequence_mean"},
        "bfloat16-moments": {**sparse, "optimizer.moments": "bfloat16"},
        "clipped-cosine": {**sparse, "optimizer.max_grad_norm": 0.1, "optimizer.schedule": "cosine",
                           "train.max_steps": 3},
        "threads-2": {**sparse, "train.threads": 2},
        "validated": {**sparse, "train.validation_steps": 1, "train.validation_sequences": 4},
        "validated-dense": {**sparse, "train.validation_sequences": 4, "train.validation_attention": "dense"},
        "adapters": {**sparse, **ADAPTERS},
        "adapters-dropout": {**sparse, **ADAPTERS, "lora.dropout": 0.1, "lora.rslora": True},
        "adapters/tp2": {**sparse, **ADAPTERS, **layout(tp=2)},
        "adapters/cp2": {**sparse, **ADAPTERS, **layout(cp=2)},
    }


def balanced():
    sab = {**PATTERNS["mass-planes"], "train.max_steps": 3, "balance.batching": "sab", "balance.ordering": "auto",
           "balance.profile": "h200-analytic"}
    anchor = {**sab, "balance.tuning": "anchor", "balance.max_budget": 1024}
    optimal, dp2, pp2 = {**anchor, "balance.tuning": "optimal"}, layout(dp=2), layout(pp=2)
    return {
        "sab/dp2": {**sab, **dp2},
        "sab/pp2": {**sab, **pp2},
        "anchor-mean/dp2": {**anchor, **dp2},
        "anchor-min/dp2": {**anchor, **dp2, "balance.anchor": "min"},
        "anchor-max/pp2": {**anchor, **pp2, "balance.anchor": "max"},
        "optimal/dp2": {**optimal, **dp2},
        "optimal/pp2": {**optimal, **pp2},
        "optimal/dp2-pp2": {**optimal, **layout(dp=2, pp=2)},
        "optimal/dp2-cp2": {**optimal, **layout(dp=2, cp=2)},
        "optimal-topk/dp2": {**optimal, **dp2, **PATTERNS["topk-planes"]},
        "sab-dense/dp2": {**sab, **dp2, **PATTERNS["dense"]},
        "deadline/pp2": {**optimal, **pp2, "balance.target": 0.5, "balance.p": 0.3},
        "pieces-128/pp2": {**optimal, **pp2, "balance.chunk": 128},
        "pieces-auto/pp2": {**optimal, **pp2, "balance.chunk": "auto"},
        "rehearsal": {**optimal, "parallel.rehearse.dp": 2, "parallel.rehearse.pp": 2},
    }


def resumptions():
    balance = balanced()
    return {
        **{name: PATTERNS[name]
           for name in ("dense", "mass-planes", "mass-lookahead", "topk-planes", "vertical_slash")},
        "mass-planes/dp2-cp2": {**PATTERNS["mass-planes"], **layout(dp=2, cp=2)},
        "mass-planes/pp2-tp2": {**PATTERNS["mass-planes"], **layout(pp=2, tp=2)},
        "bfloat16-moments": {**PATTERNS["mass-planes"], "optimizer.moments": "bfloat16"},
        "adapters": {**PATTERNS["mass-planes"], **ADAPTERS},
        "optimal/dp2": {**balance["optimal/dp2"], "train.max_steps": 4},
        "pieces-128/pp2": {**balance["pieces-128/pp2"], "train.max_steps": 4},
    }


def cases():
    found = {f"layouts/{layout_name(sizes)}/{name}": {**own, **layout(**dict(zip(KINDS, sizes)))}
             for sizes in (*LAYOUTS, *MORE_LAYOUTS) for name, own in PATTERNS.items()
             if sizes in LAYOUTS or name in MORE_PATTERNS}
    for group, part in [("patterns", scored_patterns()), ("patterns", shaped_patterns()),
                        ("columns-and-diagonals", COLUMNS_AND_DIAGONALS), ("pieces", pieces_of_sequences()),
                        ("rings", rings()), ("models", models_and_memory()), ("balanced", balanced())]:
        found.update({f"{group}/{name}": own for name, own in part.items()})
    return [Case(name, one_training(own)) for name, own in found.items()] + \
           [Case(f"resumed/{name}", resumed(own)) for name, own in resumptions().items()]
