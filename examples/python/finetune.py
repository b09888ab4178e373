"""Fine-tunes a small Qwen2 on two processes with accelerate and balanced batches.

    torchrun --nproc-per-node 2 examples/python/finetune.py

Model and documents are random, so that nothing has to be downloaded; lengths are distributed like those of chats over
long documents. bench/peers/balanced_sampler.py compares with the samplers of transformers, step by step."""

import argparse
import contextlib
import itertools
import os
import random
import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

import sparsebalance as sb
import sparsebalance.transformers as sbt
from sparsebalance.profiling import measure_profile
from sparsebalance.sampler import BalancedBatchSampler, PlannedDataset
from sparsebalance.torch import AttentionConfig
from sparsebalance.trainer import PackedCollator

VOCABULARY = 512
ATTENTION = AttentionConfig(block=64, budget=512, local_blocks=1)
SPEC = sb.AttentionSpec(block=64, budget=512, local_blocks=1)  # what the planner has to know of it


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


def make_sampler(model, lengths, batch_size, ranks):
    """Batches balanced by what this model takes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)  # a model from the hub has its folder
        profile = os.path.join(folder, "profile.json")
        measure_profile(model, SPEC, lengths, profile)
        planner = sb.Planner(folder, profile=profile, dp=ranks, micro_batch_sequences=2, attention=SPEC)
    return BalancedBatchSampler(lengths, planner, batch_size)


def train_step(model, optimizer, batches, accelerator):
    """The mean loss of the global batch, whose targets all count the same."""
    targets = torch.tensor(sum(int((batch["labels"] != -100).sum()) for batch in batches), device=accelerator.device)
    targets = accelerator.reduce(targets, "sum")
    total = 0.0
    for i, batch in enumerate(batches):
        last = i + 1 == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):  # gradients are sent once a step
            loss = model(**batch, use_cache=False, num_items_in_batch=targets).loss
            accelerator.backward(loss * accelerator.num_processes)  # processes are averaged
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(total, "sum"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step, over all processes")
    parser.add_argument("--longest", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    pool = sb.lengths("chatqa2-like")
    scale = arguments.longest / max(pool)
    lengths = [max(32, int(length * scale)) for length in random.Random(0).sample(pool, arguments.sequences)]

    model = make_model()
    sampler = make_sampler(model, lengths, arguments.batch_size, accelerator.num_processes)
    loader = DataLoader(PlannedDataset(Documents(lengths)), batch_sampler=sampler, collate_fn=PackedCollator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)
    for step in range(len(lengths) // arguments.batch_size):
        loss = train_step(model, optimizer, list(itertools.islice(batches, sampler.micro_batches)), accelerator)
        accelerator.print(f"step {step + 1}: loss {loss:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
