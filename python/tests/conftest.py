"""Common to all tests. `program` is the command line tool that the package carries."""

import json
import os
import subprocess

import pytest

from sparsebalance._program import PROGRAM

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is needed from there, and where nobody answers asking takes minutes


@pytest.fixture(scope="session")
def program():
    def run(*arguments, **options):
        return subprocess.run(
            [PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True, **options
        ).stdout

    return run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The sizes of a model that trains in no time, as a config.json."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory, program, small_model):
    """A short balanced run of the command line tool, whose planner learns nothing on the way."""
    folder = tmp_path_factory.mktemp("run")
    sizes = json.loads(small_model.read_text())
    (folder / "run.yaml").write_text(
        json.dumps(  # which is YAML, too
            {
                "model": {"init": sizes},
                "data": {"synthetic": {"task": "chunk_recall", "vocab_size": 256, "min_length": 64, "length": 2048}},
                "batch": {"global_batch_size": 8, "micro_batch_sequences": 1},
                "attention": {"pattern": "topk", "block": 64, "budget": 512, "local_blocks": 1},
                "balance": {
                    "batching": "sab",
                    "ordering": "auto",
                    "tuning": "optimal",
                    "p": 0.1,
                    "adapt": False,
                    "profile": "h200-analytic",
                },
                "parallel": {"dp": 2},
                "train": {"max_steps": 3, "output_dir": str(folder / "out")},
            }
        )
    )
    program("train", folder / "run.yaml", "--ranks", 2)
    return folder / "out"
