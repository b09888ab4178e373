"""The planner in a loop like Megatron's: a batch sampler that knows its data-parallel rank and resumes from
`consumed_samples`, and a queue in which budgets wait for the forward of their micro-batch.

    python examples/python/megatron_loop.py

Megatron's own parts are reduced to the lines that matter here. In Megatron itself, the sampler goes into a DataLoader
that is passed with --dataloader-type external, and forward_step() takes its budgets from the queue."""

import collections
import random

import sparsebalance as sb


class BalancedMegatronSampler:
    """Micro-batches of one data-parallel rank. Every rank draws the same global batches and makes the same plans."""

    def __init__(self, lengths, planner, global_batch_size, data_parallel_rank, consumed_samples=0, seed=0):
        self.lengths, self.planner, self.global_batch_size = lengths, planner, global_batch_size
        self.data_parallel_rank, self.consumed_samples, self.seed = data_parallel_rank, consumed_samples, seed
        self.budget_queue = collections.deque()
        self.num_microbatches = collections.deque()  # of the steps to come, as their plans decide

    def __iter__(self):
        batches = len(self.lengths) // self.global_batch_size
        while True:
            epoch, at = divmod(self.consumed_samples // self.global_batch_size, batches)
            order = list(range(len(self.lengths)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            batch = order[at * self.global_batch_size : (at + 1) * self.global_batch_size]
            step = self.consumed_samples // self.global_batch_size + 1
            plan = self.planner.plan(step, [self.lengths[i] for i in batch])
            micro_batches = plan.ranks[self.data_parallel_rank].micro_batches
            self.consumed_samples += len(batch)
            self.num_microbatches.append(len(micro_batches))
            for micro_batch in micro_batches:
                self.budget_queue.append(micro_batch.budgets)
                yield [batch[j] for j in micro_batch.sequences]


def train_step(data_iterator, sampler):
    """Stands for forward_backward_func(forward_step, data_iterator, num_microbatches=…), without the model."""
    tokens = []
    first = next(data_iterator)  # makes the plan of the step
    for i in range(sampler.num_microbatches.popleft()):
        sequences = first if i == 0 else next(data_iterator)
        budgets = sampler.budget_queue.popleft()  # [layers, sequences], for the attention of this forward
        assert budgets.shape[1] == len(sequences)
        tokens.append(sum(sampler.lengths[i] for i in sequences))
    return tokens


def main():
    lengths = random.Random(1).sample(sb.lengths("chatqa2-like"), 256)
    planner = sb.Planner("qwen2.5-3b", profile="h200", dp=2, micro_batch_sequences=2)
    samplers = [BalancedMegatronSampler(lengths, planner, 16, rank) for rank in range(planner.dp)]
    iterators = [iter(sampler) for sampler in samplers]
    for step in range(1, 4):
        work = [train_step(iterator, sampler) for iterator, sampler in zip(iterators, samplers)]
        print(f"step {step}: " + "; ".join(f"rank {rank}: {tokens} tokens" for rank, tokens in enumerate(work)))
    # A restarted run continues with the same batches.
    again = BalancedMegatronSampler(lengths, planner, 16, 0, consumed_samples=samplers[0].consumed_samples)
    assert next(iter(again)) == next(iterators[0])
    print("a resumed sampler goes on with the same batches")


if __name__ == "__main__":
    main()
