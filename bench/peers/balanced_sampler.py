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

    def __init__(self, lengths):
        self.lengths = lengths

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


def make_planner(lengths, given, ranks, folder):
    """For this model on this machine."""
    model, profile = make_model(), os.path.join(folder, "profile.json")
    model.config.save_pretrained(folder)
    measure_profile(model, SPEC, lengths, profile)
    # Budgets stay as they are: only the batches are compared.
    return sb.Planner(
        folder, profile=profile, dp=ranks, micro_batch_sequences=given.micro_batch, attention=SPEC, tuning="none"
    )


def make_loader(way, dataset, planner, given, accelerator):
    """Micro-batches of this process, as Trainer makes them, or as the sampler's documentation says."""
    ranks, accumulation = accelerator.num_processes, given.batch_size // accelerator.num_processes // given.micro_batch
    if way == "batch_rebalance":  # hands every process its part by itself
        sampler = BatchRebalanceSampler(
            dataset.lengths, given.batch_size, ranks, accumulation, shuffle=False, rank=accelerator.process_index
        )
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollator())
    if way == "balanced":
        sampler = BalancedBatchSampler(dataset.lengths, planner, given.batch_size, shuffle=False)
        dataset = PlannedDataset(dataset)
    elif way == "group_by_length":
        order = torch.Generator().manual_seed(0)
        grouped = LengthGroupedSampler(given.micro_batch * accumulation, lengths=dataset.lengths, generator=order)
        sampler = BatchSampler(grouped, given.micro_batch, drop_last=True)
    else:  # the lengths have been shuffled
        sampler = BatchSampler(SequentialSampler(dataset), given.micro_batch, drop_last=True)
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


def table(trained, held_out):
    """In markdown, and the ratios."""
    ours = trained["balanced"]
    lines = [
        "| batches | step, ms: clock | busiest process | processes' imbalance | most tokens of a micro-batch | loss | held out "
        "| times as long as balanced: clock | processor |",
        "| --- |" + " --- |" * 8,
    ]
    for way, own in trained.items():
        clock, busy = (1e3 * np.mean(own.steps[name]) for name in ("seconds", "busiest"))
        imbalance = np.sum(own.steps["busiest"]) / np.sum(own.steps["mean busy"])
        cells = [f"{clock:.0f}", f"{busy:.0f}", f"{imbalance:.3f}", f"{max(own.steps['most tokens']):.0f}"]
        cells += [f"{np.mean(own.steps['loss']):.5f}", f"{own.evaluate(held_out):.5f}"]
        cells += ["", ""] if own is ours else ["{:.3f} ± {:.3f}".format(*ratio(n, own, ours)) for n in ("seconds", "busiest")]
        lines.append(f"| `{way}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step, over all processes")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences, on average")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest sequence of chatqa2-like")
    given = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    pool = sb.lengths("chatqa2-like")
    scale = given.longest / max(pool)
    random.Random(0).shuffle(pool)
    lengths = [max(32, int(length * scale)) for length in pool[: given.sequences + HELD_OUT]]
    dataset, held_out = Documents(lengths[:-HELD_OUT]), Documents(lengths[-HELD_OUT:])
    with tempfile.TemporaryDirectory() as folder:
        planner = make_planner(dataset.lengths, given, accelerator.num_processes, folder)
        error = sb.profile(os.path.join(folder, "profile.json"), folder)["held_out_error"]
    accelerator.print(f"latencies of micro-batches that were not fitted: {100 * error['median']:.1f} % off in the median")

    accumulation = given.batch_size // accelerator.num_processes // given.micro_batch
    loaders = {way: make_loader(way, dataset, planner, given, accelerator) for way in WAYS}
    trained = {way: Trained(loader, accumulation, accelerator) for way, loader in loaders.items()}
    for own in trained.values():
        own.warm_up(held_out)
    for turn in range(given.sequences // given.batch_size):
        for i in range(len(WAYS)):
            trained[WAYS[(turn + i) % len(WAYS)]].step()
        if accelerator.is_main_process and turn % 10 == 9:
            print(f"{turn + 1} steps", file=sys.stderr, flush=True)
    tokens = {way: np.sum(own.steps["work"], axis=0)[0] for way, own in trained.items()}
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"the ways have not trained the same sequences: {tokens}")

    accelerator.print(table(trained, held_out))
    for peer in WAYS[1:]:
        apart = np.abs(np.subtract(trained[peer].steps["loss"], trained["balanced"].steps["loss"])).max()
        clock, error = ratio("seconds", trained[peer], trained["balanced"])
        accelerator.print(f"{peer}: loss of a step at most {apart:.1e} apart, {clock:.3f} ± {error:.3f} times as long")
    accelerator.end_training()


if __name__ == "__main__":
    main()
