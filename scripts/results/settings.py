"""Settings of the recorded trainings, written out in full: nothing is left to a default of the program, since defaults
are among the things that may change between two records."""

# Every option of run.yaml that applies to a small run on the CPU. Beta1 is 0 and nothing is clipped, so that AdamW's
# first moment in a checkpoint is the gradient of the last step, to the bit.
BASE = {
    "device": "cpu",
    "model.save_dtype": "float32",
    "model.init.model_type": "qwen2",
    "model.init.vocab_size": 64,
    "model.init.hidden_size": 64,
    "model.init.intermediate_size": 96,
    "model.init.num_hidden_layers": 4,
    "model.init.num_attention_heads": 8,
    "model.init.num_key_value_heads": 4,
    "model.init.head_dim": 16,
    "model.init.rms_norm_eps": 1e-6,
    "model.init.initializer_range": 0.1,
    "model.init.rope_theta": 10000,
    "model.init.max_position_embeddings": 4096,
    "model.init.tie_word_embeddings": True,
    "model.init.attention_bias": False,
    "data.max_sequence_length": 1000,
    "data.mixture": "sequences",
    "data.shuffle": True,
    "data.overlong": "split",
    "data.synthetic.task": "chunk_recall",
    "data.synthetic.vocab_size": 64,
    "data.synthetic.length": 1000,
    "data.synthetic.min_length": 150,
    "data.synthetic.chunk": 4,
    "data.synthetic.needles": 4,
    "data.synthetic.values": 4,
    "data.synthetic.queries": 2,
    "data.synthetic.value_tokens": 1,
    "data.synthetic.hops": 4,
    "data.synthetic.chains": 2,
    "data.synthetic.answers": 4,
    "data.synthetic.depth": -1,
    "data.synthetic.min_distance": -1,
    "batch.global_batch_size": 8,
    "batch.micro_batch_sequences": 2,
    "batch.micro_batch_tokens": 2000,
    "batch.loss": "token_mean",
    "attention.pattern": "dense",
    "attention.selection": "causal",
    "attention.score": "planes",
    "attention.score_channels": 8,
    "attention.score_tokens": 0,
    "attention.block": 64,
    "attention.query_block": 16,
    "attention.budget": 256,
    "attention.sink_blocks": 1,
    "attention.local_blocks": 1,
    "attention.step": 1,
    "attention.dense_below": -1,
    "attention.dense_layers": [],
    "attention.coverage": 0.9,
    "attention.vertical_coverage": 0.9,
    "attention.slash_coverage": 0.9,
    "attention.vertical_cap": 64,
    "attention.slash_cap": 4,
    "attention.coverage_rows": 4,
    "attention.layer_metrics": True,
    "balance.batching": "in_order",
    "balance.ordering": "none",
    "balance.tuning": "none",
    "balance.anchor": "mean",
    "balance.p": 0.1,
    "balance.target": "equal_coverage",
    "balance.max_budget": 0,
    "balance.chunk": "none",
    "balance.adapt": False,
    "balance.compare_steps": 0,
    "balance.profile": "",
    "parallel.dp": 1,
    "parallel.pp": 1,
    "parallel.cp": 1,
    "parallel.tp": 1,
    "parallel.placement": "triangular",
    "parallel.node_size": 0,
    "parallel.ring_lists": "auto",
    "parallel.backend": "auto",
    "parallel.timeout": 300,
    "parallel.rehearse.dp": 0,
    "parallel.rehearse.pp": 0,
    "optimizer.learning_rate": 1e-3,
    "optimizer.betas": [0.0, 0.95],
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_grad_norm": 0,
    "optimizer.moments": "float32",
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.warmup_ratio": 0,
    "optimizer.decay_steps": 0,
    "optimizer.min_learning_rate_ratio": 0,
    "train.max_steps": 2,
    "train.num_train_epochs": 0,
    "train.recompute": "attention",
    "train.save_steps": 0,
    "train.save_total_limit": 0,
    "train.resume": "auto",
    "train.seed": 1,
    "train.validation_steps": 0,
    "train.validation_sequences": 0,
    "train.validation_attention": "as_trained",
    "train.log_steps": 1,
    "train.tensorboard": False,
    "train.threads": 1,
    "train.loss_chunk": 300,
    "train.layer_chunk": 500,
    "train.offload": 0,
    "train.offload_optimizer": False,
    "train.precision": "float32",
    "train.fp8_skip": [],
    "train.deterministic": False,
    "train.trace": False,
}

# Optional sections of run.yaml.
ADAPTERS = {
    "lora.rank": 4,
    "lora.alpha": 8,
    "lora.dropout": 0,
    "lora.targets": "all-linear",
    "lora.rslora": False,
    "lora.train": [],
    "lora.merged": False,
}
YARN = {
    "model.rope.type": "yarn",
    "model.rope.theta": 10000,
    "model.rope.factor": 4,
    "model.rope.original_max_position_embeddings": 256,
    "model.rope.low_freq_factor": 1,
    "model.rope.high_freq_factor": 4,
    "model.rope.beta_fast": 32,
    "model.rope.beta_slow": 1,
    "model.rope.attention_factor": 0,
    "model.rope.mscale": 0,
    "model.rope.mscale_all_dim": 0,
    "model.rope.truncate": True,
}


def attention(pattern, **more):
    return {"attention.pattern": pattern, **{f"attention.{name}": value for name, value in more.items()}}


# What every layout runs.
PATTERNS = {
    "dense": attention("dense"),
    "mass-planes": attention("mass"),
    "mass-moments": attention("mass", score="moments"),
    "mass-lookahead": attention("mass", selection="lookahead"),
    "topk-planes": attention("topk"),
    "topk-moments": attention("topk", score="moments"),
    "topk-exact": attention("topk", score="moments", score_tokens=1),
    "topk-block-mean": attention("topk", selection="lookahead", score="mean", query_block=64),
    "topp-planes": attention("topp"),
    "topp-lookahead": attention("topp", selection="lookahead"),
    "vertical_slash": attention("vertical_slash", selection="lookahead", query_block=64),
    "window": attention("window"),
}

# Scores with what they are made of; `planes` of all 16 channels, and of half of them.
SCORES = {
    "planes": {"score": "planes", "score_channels": 8},
    "planes-all": {"score": "planes", "score_channels": 32},
    "moments": {"score": "moments"},
    "moments-16": {"score": "moments", "score_tokens": 16},
    "exact": {"score": "moments", "score_tokens": 1},
    "mean": {"score": "mean"},
    "mean-16": {"score": "mean", "score_tokens": 16},
}


def scored_patterns():
    """Every pattern that ranks blocks, in both orders, by every score."""
    return {f"{pattern}-{selection}-{score}": attention(pattern, selection=selection, **how)
            for pattern in ("mass", "topk", "topp") for selection in ("causal", "lookahead")
            for score, how in SCORES.items()}


SHAPES = {
    "block-128": {"block": 128, "budget": 512},
    "block-256": {"block": 256, "budget": 1024},
    "query_block-1": {"query_block": 1},
    "query_block-64": {"query_block": 64},
    "query_block-128": {"query_block": 128},
    "step-0": {"step": 0},
    "step-4": {"step": 4},
    "no-sink": {"sink_blocks": 0, "local_blocks": 0},
    "wide": {"sink_blocks": 2, "local_blocks": 3, "budget": 512},
    "dense_below-0": {"dense_below": 0},
    "dense_below-600": {"dense_below": 600},
    "dense_layers": {"dense_layers": [0, 2]},
    "odd-budget": {"budget": 333},
    "no-coverage": {"coverage_rows": 0, "layer_metrics": False},
}
SHAPED = {"mass": {}, "topk": {}, "topp": {}, "vertical_slash": {"selection": "lookahead"}, "window": {}}


def shaped_patterns():
    return {f"{pattern}-{shape}": attention(pattern, **how, **more)
            for pattern, how in SHAPED.items() for shape, more in SHAPES.items()}


COLUMNS_AND_DIAGONALS = {
    "few": attention("vertical_slash", selection="lookahead", vertical_cap=3, slash_cap=1),
    "columns-only": attention("vertical_slash", selection="lookahead", vertical_cap=200, slash_cap=0),
    "diagonals-only": attention("vertical_slash", selection="lookahead", vertical_cap=0, slash_cap=8),
    "all-mass": attention("vertical_slash", selection="lookahead", vertical_coverage=1, slash_coverage=1),
    "little-mass": attention("vertical_slash", selection="lookahead", vertical_coverage=0.3, slash_coverage=0.3),
}

# dp, pp, cp, tp: each alone, and their products on up to 8 ranks.
LAYOUTS = [
    (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 3, 1), (1, 1, 4, 1), (1, 1, 1, 4),
    (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 8, 1), (1, 2, 2, 2),
]
# More ranks that see other sequences or layers: attention runs there as on two.
MORE_LAYOUTS = [(3, 1, 1, 1), (1, 3, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2), (2, 1, 2, 2)]
MORE_PATTERNS = ("dense", "mass-planes", "mass-lookahead", "vertical_slash")
KINDS = ("dp", "pp", "cp", "tp")


def layout_name(sizes):
    return "-".join(f"{kind}{size}" for kind, size in zip(KINDS, sizes) if size > 1) or "one-rank"


def layout(**sizes):
    return {f"parallel.{kind}": sizes.get(kind, 1) for kind in KINDS}


def ranks_of(settings):
    count = 1
    for kind in KINDS:
        count *= settings[f"parallel.{kind}"]
    return count


def nested(settings):
    """{"a.b": 1} as {"a": {"b": 1}}, which is YAML once it is JSON."""
    tree = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return tree
