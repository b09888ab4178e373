"""Training steps of a small Qwen2 on two processes with the balanced sampler and with the samplers of transformers.

    torchrun --nproc-per-node 2 bench/peers/balanced_sampler.py [--sequences 1600] [--batch-size 16] [--longest 4096]

Every way of making batches trains a model of its own from the same weights, on the same sequences, once, packed without
padding by the same collator; lengths are those of chatqa2-like, scaled down. The ways take turns step by step, and another
one begins every time, so that whatever slows the machine slows all of them. A step is timed from barrier to barrier, with
the making of its batches; processor time is that of its busiest process. Prints a table for docs/python.md."""

import argparse
import collections
import contextlib
import itertools
import os
import random
import sys
import tempfile
import time

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

import sparsebalance as sb
import sparsebalance.transformers as sbt
from sparsebalance.profiling import measure_profile
from sparsebalance.sampler import BalancedBatchSampler, PlannedDataset
from sparsebalance.torch import AttentionConfig
from sparsebalance.trainer import PackedCollator

WAYS = ("balanced", "batch_rebalance", "group_by_length", "random")
VOCABULARY, HELD_OUT = 512, 32
ATTENTION = AttentionConfig(block=64, budget=512, local_blocks=1)
SPEC = sb.AttentionSpec(block=ATTENTION.block, budget=ATTENTION.budget, local_blocks=ATTENTION.local_blocks)


class Documents(torch.utils.data.Dataset):
    """Random tokens that repeat themselves, so that there is something to learn."""

    def __init__(self, unscaled, scale):
        self.unscaled = unscaled
        self.lengths = [max(32, int(length * scale)) for length in unscaled]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        phrase = torch.randint(0, VOCABULARY, (31,), generator=generator)
        return {"input_ids": phrase.repeat(self.lengths[index] // 31 + 1)[: self.lengths[index]]}


def make_model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sparsebalance",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    sbt.configure(model, ATTENTION)
    return model


def make_planner(folder, micro_batch, ranks):
    # Budgets stay as they are: only the batches are compared.
    profile = os.path.join(folder, "profile.json")
    return sb.Planner(folder, profile=profile, dp=ranks, micro_batch_sequences=micro_batch, attention=SPEC, tuning="none")


def make_loader(way, dataset, planner, micro_batch, batch_size, accelerator):
    """Micro-batches of this process: as Trainer makes them, or as the sampler's documentation says."""
    ranks, accumulation = accelerator.num_processes, batch_size // accelerator.num_processes // micro_batch
    if way == "batch_rebalance":  # hands every process its part by itself; weighs attention as lengths are in earnest
        sampler = BatchRebalanceSampler(
            dataset.unscaled, batch_size, ranks, accumulation, shuffle=False, rank=accelerator.process_index
        )
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator())
    if way == "balanced":
        sampler = BalancedBatchSampler(dataset.lengths, planner, batch_size, shuffle=False)
        dataset = PlannedDataset(dataset)
    elif way == "group_by_length":
        order = torch.Generator().manual_seed(0)
        grouped = LengthGroupedSampler(micro_batch * accumulation, lengths=dataset.lengths, generator=order)
        sampler = BatchSampler(grouped, micro_batch, drop_last=True)
    else:  # the dataset's order is random
        sampler = BatchSampler(SequentialSampler(dataset), micro_batch, drop_last=True)
    return accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator()))


class Trained:
    """A model with its optimizer and its batches, and what its steps took."""

    def __init__(self, loader, accumulation, accelerator):
        model = make_model()
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.batches, self.accumulation, self.accelerator = iter(loader), accumulation, accelerator
        self.steps = collections.defaultdict(list)

    def warm_up(self, dataset):
        """Passes that change nothing: DDP, for one, looks at the first two."""
        for i in range(2):
            self.accelerator.backward(self.model(**PackedCollator()([dataset[i]]), use_cache=False).loss)
            self.optimizer.zero_grad()

    def step(self):
        """Trains one step, and notes it, over all processes."""
        self.accelerator.wait_for_everyone()
        begin, begin_busy = time.perf_counter(), time.process_time()
        batches = list(itertools.islice(self.batches, self.accumulation))
        targets = torch.tensor(sum(int((batch["labels"] != -100).sum()) for batch in batches))
        targets = self.accelerator.reduce(targets, "sum")
        loss = torch.zeros(())
        for i, batch in enumerate(batches):
            last = i + 1 == self.accumulation
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                part = self.model(**batch, use_cache=False, num_items_in_batch=targets).loss
                self.accelerator.backward(part * self.accelerator.num_processes)  # processes are averaged
            loss += part.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        busy = time.process_time() - begin_busy
        self.accelerator.wait_for_everyone()
        self.note(time.perf_counter() - begin, busy, float(loss), batches)

    def note(self, seconds, busy, loss, batches):
        lengths = torch.cat([batch["cu_seq_lens_q"].diff() for batch in batches]).double()
        within = lengths.clamp(max=ATTENTION.budget)
        own = [seconds, busy, loss, float(lengths.sum()), float((within * (lengths - within / 2)).sum())]
        own.append(max(float(batch["cu_seq_lens_q"][-1]) for batch in batches))
        every = self.accelerator.gather(torch.tensor([own], dtype=torch.float64)).numpy()
        self.steps["seconds"].append(every[:, 0].max())
        self.steps["busiest"].append(every[:, 1].max())
        self.steps["mean busy"].append(every[:, 1].mean())
        self.steps["loss"].append(every[:, 2].sum())
        self.steps["work"].append(every[:, 3:5].sum(0))  # tokens and pairs
        self.steps["most tokens"].append(every[:, 5].max())

    @torch.no_grad()
    def evaluate(self, dataset):
        losses = [self.model(**PackedCollator()([dataset[i]]), use_cache=False).loss for i in range(len(dataset))]
        return float(torch.stack(losses).mean())


def unexplained(trained, name):
    """What the number and lengths of a step's sequences do not tell of what it took."""
    taken, work = np.array(trained.steps[name]), np.array(trained.steps["work"])
    sizes = np.column_stack([np.ones(len(taken)), work / work.mean(0)])
    return taken - sizes @ np.linalg.lstsq(sizes, taken)[0]


def ratio(name, peer, ours):
    """How many times as long all steps of the peer took, and the standard error. Both have trained the same sequences, but
    length grouping's steps are of other sizes: steps of the same turn are compared after what follows from their sizes."""
    total = np.sum(ours.steps[name])
    times = np.sum(peer.steps[name]) / total
    errors = unexplained(peer, name) - times * unexplained(ours, name)
    return times, np.sqrt(len(errors)) * errors.std(ddof=1) / total


COLUMNS = (
    "micro-batches", "batches", "clock, ms", "busiest process, ms", "imbalance", "most tokens at once", "loss",
    "held-out loss", "times balanced: clock", "processor",
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


def train(trained, turns, accelerator):
    """All ways in turns."""
    every = list(trained.values())
    for turn in range(turns):
        for i in range(len(every)):
            every[(turn + i) % len(every)].step()
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
    dataset, held_out = Documents(drawn[:-HELD_OUT], scale), Documents(drawn[-HELD_OUT:], scale)

    trained = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model()
        model.config.save_pretrained(folder)
        measure_profile(model, SPEC, dataset.lengths, os.path.join(folder, "profile.json"))
        error = sb.profile(os.path.join(folder, "profile.json"), folder)["held_out_error"]["median"]
        accelerator.print(f"predicted latencies are {100 * error:.1f} % off, in the median of those that were not fitted")
        for micro_batch, way in itertools.product(given.micro_batch, WAYS):
            planner = make_planner(folder, micro_batch, accelerator.num_processes)
            loader = make_loader(way, dataset, planner, micro_batch, given.batch_size, accelerator)
            accumulation = given.batch_size // accelerator.num_processes // micro_batch
            trained[micro_batch, way] = Trained(loader, accumulation, accelerator)
    for own in trained.values():
        own.warm_up(held_out)
    train(trained, given.sequences // given.batch_size, accelerator)
    accelerator.print(table(trained, held_out))
    for (micro_batch, way), own in trained.items():
        ours = trained[micro_batch, "balanced"]
        if own is not ours:
            apart = np.abs(np.subtract(own.steps["loss"], ours.steps["loss"])).max()
            accelerator.print(
                "{}, {} micro-batches: losses of a step at most {:.0e} apart; balanced is {:.3f} ± {:.3f} times as "
                "fast".format(way, own.accumulation, apart, *ratio("seconds", own, ours))
            )
    accelerator.end_training()


if __name__ == "__main__":
    main()
