"""Training steps of a small Qwen2 on two processes with the balanced sampler and with the samplers of transformers.

    torchrun --nproc-per-node 2 bench/peers/balanced_sampler.py [--sequences 1600] [--batch-size 16] [--longest 4096]

Model, documents and training step are those of examples/python/finetune.py. Every way of making batches trains a model
of its own from the same weights, on the same sequences, once, packed without padding by the same collator; lengths are
those of chatqa2-like, scaled down. The ways take turns step by step, in another order every time, so that whatever
slows the machine slows all of them. A step is timed from barrier to barrier, with the making of its batches; processor
time is that of its busiest process. Prints a table for docs/python.md."""

import argparse
import collections
import itertools
import os
import pathlib
import random
import sys
import tempfile
import time

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

import sparsebalance as sb
from sparsebalance.profiling import measure_profile
from sparsebalance.sampler import BalancedBatchSampler, PlannedDataset
from sparsebalance.trainer import PackedCollator

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "python"))
from finetune import ATTENTION, SPEC, Documents, make_model, train_step  # noqa: E402

WAYS = ("balanced", "batch_rebalance", "group_by_length", "random")
HELD_OUT = 32


def make_planner(folder, micro_batch, ranks):
    # Budgets stay as they are: only the batches are compared.
    profile = os.path.join(folder, "profile.json")
    return sb.Planner(
        folder, profile=profile, dp=ranks, micro_batch_sequences=micro_batch, attention=SPEC, tuning="none"
    )


def make_loader(way, documents, drawn, planner, micro_batch, batch_size, accelerator):
    """Micro-batches of this process: as Trainer makes them, or as the sampler's documentation says."""
    ranks, accumulation = accelerator.num_processes, batch_size // accelerator.num_processes // micro_batch
    lengths = documents.lengths[: len(drawn)]
    if way == "batch_rebalance":
        # Hands every process its part by itself. How it weighs attention is meant for lengths that are not scaled down.
        sampler = BatchRebalanceSampler(
            drawn, batch_size, ranks, accumulation, shuffle=False, rank=accelerator.process_index
        )
        return DataLoader(documents, batch_sampler=sampler, collate_fn=PackedCollator())
    if way == "balanced":
        sampler = BalancedBatchSampler(lengths, planner, batch_size, shuffle=False)
        documents = PlannedDataset(documents)
    elif way == "group_by_length":
        order = torch.Generator().manual_seed(0)
        grouped = LengthGroupedSampler(micro_batch * accumulation, lengths=lengths, generator=order)
        sampler = BatchSampler(grouped, micro_batch, drop_last=True)
    else:  # the documents' order is random
        sampler = BatchSampler(range(len(lengths)), micro_batch, drop_last=True)
    return accelerator.prepare(DataLoader(documents, batch_sampler=sampler, collate_fn=PackedCollator()))


class Trained:
    """A model with its optimizer and its batches, and what its steps took."""

    def __init__(self, loader, accumulation, accelerator):
        model = make_model()
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.batches, self.accumulation, self.accelerator = iter(loader), accumulation, accelerator
        self.steps = collections.defaultdict(list)

    def loss(self, sample):
        return self.model(**PackedCollator()([sample]), use_cache=False).loss

    def warm_up(self, samples):
        """Passes that change nothing: DDP, for one, looks at the first two."""
        for sample in samples[:2]:
            self.accelerator.backward(self.loss(sample))
            self.optimizer.zero_grad()

    def step(self):
        """Trains one step, and notes it, over all processes."""
        self.accelerator.wait_for_everyone()
        begin, begin_busy = time.perf_counter(), time.process_time()
        batches = list(itertools.islice(self.batches, self.accumulation))
        loss = train_step(self.model, self.optimizer, batches, self.accelerator)
        busy = time.process_time() - begin_busy
        self.accelerator.wait_for_everyone()
        self.note(time.perf_counter() - begin, busy, loss, batches)

    def note(self, seconds, busy, loss, batches):
        lengths = torch.cat([batch["cu_seq_lens_q"].diff() for batch in batches]).double()
        within = lengths.clamp(max=ATTENTION.budget)
        pairs = within * (lengths - within / 2)
        most = max(int(batch["cu_seq_lens_q"][-1]) for batch in batches)
        own = [seconds, busy, float(lengths.sum()), float(pairs.sum()), most]
        every = self.accelerator.gather(torch.tensor([own], dtype=torch.float64)).numpy()
        self.steps["seconds"].append(every[:, 0].max())
        self.steps["busiest"].append(every[:, 1].max())
        self.steps["mean busy"].append(every[:, 1].mean())
        self.steps["work"].append(every[:, 2:4].sum(0))  # tokens and pairs
        self.steps["most tokens"].append(every[:, 4].max())
        self.steps["loss"].append(loss)

    @torch.no_grad()
    def evaluate(self, samples):
        return float(torch.stack([self.loss(sample) for sample in samples]).mean())


def unexplained(trained, name):
    """What the number and lengths of a step's sequences do not tell of what it took."""
    taken, work = np.array(trained.steps[name]), np.array(trained.steps["work"])
    sizes = np.column_stack([np.ones(len(taken)), work / work.mean(0)])
    return taken - sizes @ np.linalg.lstsq(sizes, taken)[0]


def ratio(name, peer, ours):
    """How many times as long all steps of the peer took, and the standard error. Both have trained the same sequences,
    but length grouping's steps are of other sizes: steps of the same turn are compared after what follows from that."""
    total = np.sum(ours.steps[name])
    times = np.sum(peer.steps[name]) / total
    errors = unexplained(peer, name) - times * unexplained(ours, name)
    return times, np.sqrt(len(errors)) * errors.std(ddof=1) / total


COLUMNS = (
    "micro-batches", "sampler", "step, ms", "busiest process, ms", "imbalance", "most tokens at once", "loss",
    "held-out loss", "step / balanced", "busiest / balanced",
)  # fmt: skip


def table(trained, held_out):
    """In markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for (micro_batch, way), own in trained.items():
        clock, busy = (f"{1e3 * np.mean(own.steps[name]):.0f}" for name in ("seconds", "busiest"))
        imbalance = np.sum(own.steps["busiest"]) / np.sum(own.steps["mean busy"])
        ours = trained[micro_batch, "balanced"]
        ratios = ["{:.3f} ± {:.3f}".format(*ratio(name, own, ours)) for name in ("seconds", "busiest")]
        rows.append([
            str(own.accumulation), f"`{way}`", clock, busy, f"{imbalance:.3f}", f"{max(own.steps['most tokens']):.0f}",
            f"{np.mean(own.steps['loss']):.5f}", f"{own.evaluate(held_out):.5f}",
            *(["1", "1"] if own is ours else ratios),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def against_balanced(peer, micro_batch, trained):
    ours = trained[micro_batch, "balanced"]
    apart = np.abs(np.subtract(peer.steps["loss"], ours.steps["loss"])).max()
    text = "losses of a step at most {:.0e} apart; balanced is {:.3f} ± {:.3f} times as fast".format(
        apart, *ratio("seconds", peer, ours)
    )
    for own in (own for (_, way), own in trained.items() if way == "balanced"):
        no_larger = max(own.steps["most tokens"]) <= max(peer.steps["most tokens"])
        if own.accumulation < ours.accumulation and no_larger:
            text += ", {:.3f} ± {:.3f} with {} micro-batches, which are no larger than the peer's".format(
                *ratio("seconds", peer, own), own.accumulation
            )
    return text


def train(trained, turns, accelerator):
    """All ways in turns."""
    for turn in range(turns):
        for own in random.Random(turn).sample(list(trained.values()), len(trained)):
            own.step()
        if turn % 10 == 9 and accelerator.is_main_process:
            print(f"{turn + 1} of {turns} steps", file=sys.stderr, flush=True)
    tokens = {name: np.sum(own.steps["work"], axis=0)[0] for name, own in trained.items()}
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"not all have trained the same sequences: {tokens}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=1600, help="a multiple of --batch-size")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step, over all processes")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2, 4], help="sequences, on average")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest sequence of chatqa2-like")
    given = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    pool = sb.lengths("chatqa2-like")
    scale = given.longest / max(pool)
    drawn = random.Random(0).sample(pool, given.sequences + HELD_OUT)
    documents = Documents([max(32, int(length * scale)) for length in drawn])
    held_out = [documents[given.sequences + i] for i in range(HELD_OUT)]
    drawn = drawn[: given.sequences]

    trained = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model()
        model.config.save_pretrained(folder)
        measure_profile(model, SPEC, documents.lengths, os.path.join(folder, "profile.json"))
        error = sb.profile(os.path.join(folder, "profile.json"), folder)["held_out_error"]["median"]
        accelerator.print(f"predicted latencies that were not fitted are {100 * error:.1f} % off in the median")
        for micro_batch, way in itertools.product(given.micro_batch, WAYS):
            planner = make_planner(folder, micro_batch, accelerator.num_processes)
            loader = make_loader(way, documents, drawn, planner, micro_batch, given.batch_size, accelerator)
            accumulation = given.batch_size // accelerator.num_processes // micro_batch
            trained[micro_batch, way] = Trained(loader, accumulation, accelerator)
    for own in trained.values():
        own.warm_up(held_out)
    train(trained, given.sequences // given.batch_size, accelerator)
    accelerator.print(table(trained, held_out))
    for (micro_batch, way), own in trained.items():
        if way != "balanced":
            compared = against_balanced(own, micro_batch, trained)
            accelerator.print(f"{way}, {own.accumulation} micro-batches: {compared}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
