"""A training on several hosts that a test disturbs: what was said when, when it ended, when it trained again."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time

from hosts import kill, processes

RUN = """
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 4,
         num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}
data:
  synthetic: {task: chunk_recall, vocab_size: 16, length: 400, chunk: 4}
attention: {pattern: topk, block: 64, budget: 256, dense_below: 64, local_blocks: 1}
batch: {global_batch_size: 6, micro_batch_sequences: 2}
optimizer: {learning_rate: 1.0e-3, schedule: constant}
train: {max_steps: 100, save_steps: 10, save_total_limit: 3, threads: 1, tensorboard: false}
"""


class Failure(Exception):
    pass


class Output:
    """What a process says, with the time of every line."""

    def __init__(self, stream):
        self.lines = []  # (monotonic time, text)
        self.thread = threading.Thread(target=self.read, args=(stream,), daemon=True)
        self.thread.start()

    def read(self, stream):
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def text(self):
        return "\n".join(line for _, line in self.lines)

    def first(self, words, since):
        """Seconds from `since` to the first line after it that has one of the words; None: none has."""
        for when, line in list(self.lines):
            if when >= since and any(word in line for word in words):
                return when - since
        return None


class Training:
    """`launch(ranks)` gives the launcher's words and how to start a process with them."""

    def __init__(self, program, folder, settings=(), ranks=3):
        self.program, self.folder, self.ranks = program, pathlib.Path(folder), ranks
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(RUN)
        self.settings = [f"train.output_dir={self.folder}/run", f"parallel.dp={ranks}", *settings]
        self.process = self.output = None

    def command(self):
        return [self.program, "train", self.folder / "run.yaml",
                *[word for setting in self.settings for word in ("--set", setting)]]

    def start(self, launch):
        """launch(words, **options) → the launcher's process."""
        # Without what ssh does not carry to the other hosts, and what would change the bits.
        environment = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE",
                                                                                         "OPENBLAS_L2_SIZE")}
        environment["OPENBLAS_NUM_THREADS"] = "1"
        self.process = launch([str(word) for word in self.command()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", env=environment)
        self.output = Output(self.process.stdout)

    def steps(self):
        try:
            lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            try:
                return json.loads(line)["step"]
            except ValueError:
                continue
        return 0

    def checkpoint(self):
        steps = [int(path.name.split("-")[1]) for path in (self.folder / "run").glob("checkpoint-*")]
        return max(steps, default=0)

    def wait_for_step(self, step, limit=120):
        deadline = time.monotonic() + limit
        while self.steps() < step:
            if self.process.poll() is not None:
                raise Failure(f"it ended with {self.process.returncode} before step {step}:\n{self.output.text()}")
            if time.monotonic() > deadline:
                raise Failure(f"no step {step} within {limit} s:\n{self.output.text()}")
            time.sleep(0.01)

    def end(self, limit):
        """The exit code; Failure when it still runs after so many seconds."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"it still runs after {limit} s:\n{self.output.text()}") from error
        self.output.thread.join(10)
        return code

    def rank_processes(self):
        """Rank → process id."""
        found = {}
        for process, environment, words in processes():
            rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("PMIX_RANK"))
            if rank is not None and words[0] == str(self.program) and str(self.folder / "run.yaml") in words:
                found[int(rank)] = process
        return found

    def left(self, limit=3):
        """The processes of this run that are still there after so many seconds."""
        deadline = time.monotonic() + limit
        while True:
            found = [process for process, _, words in processes() if str(self.folder / "run.yaml") in words]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def stop_all(self):
        for process in self.left(0):
            kill(process, signal.SIGKILL)

    def model(self):
        return (self.folder / "run/final/model.safetensors").read_bytes()

    def losses(self):
        return [json.loads(line).get("loss") for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
