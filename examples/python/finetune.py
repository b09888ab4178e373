"""Fine-tunes a small Qwen2 on two processes, once for each way of making batches, and prints how long an epoch took.

    torchrun --nproc-per-node 2 examples/python/finetune.py

Model and documents are random, so that nothing has to be downloaded; lengths are distributed like those of chats over
long documents. Every way sees the same sequences, packed without padding, with the same attention. `balanced` and
`batch_rebalance` take the same global batches, so that their losses agree up to the order of sums."""

import argparse
import random
import time

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

import sparsebalance as sb
import sparsebalance.transformers as sbt
from sparsebalance.sampler import BalancedBatchSampler, PlannedDataset
from sparsebalance.torch import AttentionConfig
from sparsebalance.trainer import PackedCollator

VOCABULARY, MICRO_BATCH = 512, 2
ATTENTION = AttentionConfig(block=64, budget=512, local_blocks=1)


class Documents(torch.utils.data.Dataset):
    """Documents that repeat a random phrase, so that there is something to learn."""

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


def make_loader(way, dataset, model, batch_size, accelerator):
    """This process's micro-batches, and how many of them make a step."""
    ranks, collate = accelerator.num_processes, PackedCollator()
    steps = batch_size // ranks // MICRO_BATCH
    if way == "balanced":
        spec = sb.AttentionSpec(block=ATTENTION.block, budget=ATTENTION.budget, local_blocks=ATTENTION.local_blocks)
        model.config.save_pretrained(folder := f"/tmp/sparsebalance-example-{accelerator.process_index}")
        # Budgets are not tuned, so that only the batches differ.
        planner = sb.Planner(folder, dp=ranks, micro_batch_sequences=MICRO_BATCH, attention=spec, tuning="none")
        sampler = BalancedBatchSampler(dataset.lengths, planner, batch_size, shuffle=False)
        loader = DataLoader(PlannedDataset(dataset), batch_sampler=sampler, collate_fn=collate)
        return accelerator.prepare(loader), steps
    if way == "batch_rebalance":  # transformers' own sampler, which gives every process its part
        sampler = BatchRebalanceSampler(
            dataset.lengths, batch_size, ranks, steps, shuffle=False, rank=accelerator.process_index
        )
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate), steps
    grouped = LengthGroupedSampler(MICRO_BATCH * ranks, lengths=dataset.lengths)
    loader = DataLoader(dataset, batch_sampler=BatchSampler(grouped, MICRO_BATCH, drop_last=True), collate_fn=collate)
    return accelerator.prepare(loader), steps


def multiply_adds(batch):
    """Of a layer's forward and its share of the head, from the sizes above: a process's work, free of timing noise."""
    total = 0
    for length in batch["cu_seq_lens_q"].diff().tolist():
        dense = min(length, ATTENTION.budget)
        pairs = dense * (dense + 1) / 2 + (length - dense) * ATTENTION.budget
        total += length * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 128 * VOCABULARY / 2) + pairs * 2 * 128
    return total


def train_epoch(way, dataset, batch_size, accelerator):
    """Wall-clock seconds, processor seconds of the busiest process of each step, mean loss per target during training,
    and the work of the busiest processes over the mean."""
    torch.manual_seed(0)
    model = make_model()
    loader, steps = make_loader(way, dataset, model, batch_size, accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss_sum = targets_sum = busiest = most_work = mean_work = 0.0
    accelerator.wait_for_everyone()
    begin, batches = time.perf_counter(), iter(loader)
    while True:
        step = [batch for _, batch in zip(range(steps), batches)]
        if len(step) < steps:
            break
        targets = torch.tensor(float(sum((batch["labels"] != -100).sum() for batch in step)))
        targets = accelerator.reduce(targets, "sum")
        work = accelerator.gather(torch.tensor([float(sum(map(multiply_adds, step)))]))
        most_work, mean_work = most_work + float(work.max()), mean_work + float(work.mean())
        computing = time.thread_time()
        for i, batch in enumerate(step):
            labels = batch.pop("labels")
            with accelerator.no_sync(model) if i + 1 < steps else torch.enable_grad():
                logits = model(**batch, use_cache=False).logits[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
                # Gradients are averaged over processes, but the loss is a mean over the whole step.
                accelerator.backward(loss * accelerator.num_processes / targets)
            loss_sum += float(loss.detach())
        own = torch.tensor([time.thread_time() - computing])
        busiest += float(accelerator.gather(own).max())
        optimizer.step()
        optimizer.zero_grad()
        targets_sum += float(targets)
    accelerator.wait_for_everyone()
    seconds = time.perf_counter() - begin
    loss = float(accelerator.reduce(torch.tensor(loss_sum), "sum")) / targets_sum
    return seconds, busiest, loss, most_work / mean_work


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step, over all processes")
    parser.add_argument("--longest", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    pool = sb.lengths("chatqa2-like")
    random.Random(0).shuffle(pool)
    scale = arguments.longest / max(pool)
    dataset = Documents([max(32, int(length * scale)) for length in pool[: arguments.sequences]])

    train_epoch("balanced", Documents(dataset.lengths[: arguments.batch_size]), arguments.batch_size, accelerator)
    results = {}
    for way in ("group_by_length", "batch_rebalance", "balanced"):
        seconds, busiest, loss, imbalance = results[way] = train_epoch(way, dataset, arguments.batch_size, accelerator)
        spent = f"{seconds:6.2f} s, of them {busiest:6.2f} s computing"
        accelerator.print(f"{way:16} {spent}, imbalance {imbalance:.3f}, loss {loss:.5f}")
    for way in ("group_by_length", "batch_rebalance"):
        by_clock, computing = (results[way][i] / results["balanced"][i] for i in (0, 1))
        accelerator.print(f"balanced is {by_clock:.2f} times as fast as {way}; {computing:.2f} times by what it computes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
